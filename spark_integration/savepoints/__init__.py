"""Savepoints of running and stopped queries."""
