"""Exactly-once results: programs that use a sink, and a custom sink."""
