"""State variables and timers of a processor: tables, seen key by key."""
