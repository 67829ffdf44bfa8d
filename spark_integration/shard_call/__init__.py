"""Runs a shard's call: claims its directory, opens its store, runs the operator, commits, announces the commit."""
