"""Built-in operators as functions of a shard: aggregation, sessions, deduplication, joins, top, latest."""
