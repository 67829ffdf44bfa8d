"""Reads a query's state without Spark: look-ups by key, a key's history, pages of rows, differences."""
