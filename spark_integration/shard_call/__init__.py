"""One call of a shard: claim its directory, open its store, run the operator, commit, announce."""
