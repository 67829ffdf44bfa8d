"""The bridge to Spark: how rows reach a shard, and how a shard takes part in a streaming query."""
