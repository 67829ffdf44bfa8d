"""Operators in one line, as functions of a shard: aggregation, sessions, deduplication, joins, top, latest."""
