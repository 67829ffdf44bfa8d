"""How rows reach their shard and how output leaves it: routes, and the ways of both."""
