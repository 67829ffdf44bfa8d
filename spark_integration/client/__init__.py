"""A worker's way to the state server: connection, messages, measures."""
