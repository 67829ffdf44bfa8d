"""Savepoints of queries: made beside a running query, or after it."""
