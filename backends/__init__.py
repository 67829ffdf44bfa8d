"""Where the working state of one shard lives: the lowest layer, below versions, durability and Spark."""
