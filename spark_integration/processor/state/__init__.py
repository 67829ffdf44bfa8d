"""State variables and timers of a processor: what stands in tables, seen key by key."""
