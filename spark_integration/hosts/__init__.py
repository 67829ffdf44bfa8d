"""Spark's own operators, of which each shard is one group: they keep its pointer, and call it."""
