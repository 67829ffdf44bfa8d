"""State tables that several APIs share: entries of lists and maps, and what a restart may change of any table."""
