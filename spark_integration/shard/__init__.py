"""What all share of a shard: its pointer, its operator, its task and the storage of that, its timeout."""
