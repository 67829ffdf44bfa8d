"""Spark's stateful operators as functions of a shard: aggregation by key and by window, sessions, deduplication."""
