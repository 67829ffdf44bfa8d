"""Backends, which keep the working state of a shard: the lowest layer, below versions, durability and Spark."""
