"""Exactly-once output: two-phase-commit sinks, their coordinator, and the two entry points from Spark."""
