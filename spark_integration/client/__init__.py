"""A worker's client of the state server: connection, messages, measures."""
