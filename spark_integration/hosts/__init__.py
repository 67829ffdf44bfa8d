"""The Spark operators that run steps: each shard is one of their groups, whose state is the shard's pointer."""
