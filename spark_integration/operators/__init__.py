"""Stateful operators as functions of a shard: aggregation by key and window, sessions, deduplication, top, latest."""
