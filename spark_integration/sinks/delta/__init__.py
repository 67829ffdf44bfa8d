"""Delta table sink: one Delta commit per micro-batch."""
