"""State tables that several APIs share: timers, and rows that expire."""
