"""Exactly-once results: sinks in use, and one of your own."""
