"""Snapshots: the files that a backend froze, in durable storage, and when a new one is due."""
