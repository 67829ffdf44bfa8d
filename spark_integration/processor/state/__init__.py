"""A processor's state variables and timers, stored in tables and used key by key."""
