"""How rows reach their shard and how output leaves it."""
