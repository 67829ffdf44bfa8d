"""Reads a query's checkpoint location without Spark: its logs, and the state that holds pointers."""
