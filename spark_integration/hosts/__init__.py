"""Spark's own operators: each shard is one of their groups; they keep its pointer, and call it."""
