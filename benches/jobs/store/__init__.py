"""Work on the store, or on savepoints of it: no streaming query."""
