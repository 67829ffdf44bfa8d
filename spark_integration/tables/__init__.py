"""State tables shared by several APIs: entries of lists and maps, and the changes to tables that a restart may make."""
