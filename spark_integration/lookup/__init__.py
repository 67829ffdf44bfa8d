"""Reads a query's state without Spark: lookups by key, a key's history, pages of rows, differences."""
