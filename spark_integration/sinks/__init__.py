"""Exactly-once results: two-phase-commit sinks, their coordinator, and the two ways from Spark into them."""
