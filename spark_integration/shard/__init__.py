"""One call for each shard and micro-batch, in a Python worker."""
