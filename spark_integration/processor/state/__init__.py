"""State variables and timers of a processor, stored in tables and used key by key."""
