"""What all other rooms use of a shard: its pointer, operator, task, storage and timeout."""
