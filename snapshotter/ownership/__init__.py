"""Ownership of directories in durable storage: operator records, and the claims of runs."""
