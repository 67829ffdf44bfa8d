"""Where the working state of one shard lives: the lowest layer, below versions, durability and Spark.

A backend turns runs (sorted, immutable Arrow tables) into the versions of one shard and gives read views of them. It
knows nothing of transactions, pointers, retention or Spark; it imports nothing of holdfast but its errors and clock.
"""
