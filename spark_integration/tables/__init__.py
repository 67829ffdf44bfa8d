"""Parts of state tables that several APIs share: rows of lists and maps, and checks of changed tables at a restart."""
