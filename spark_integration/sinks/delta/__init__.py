"""Results in a Delta table: one Delta commit a micro-batch."""
