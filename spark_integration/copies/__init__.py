"""New queries that go on from another one at once: with other shards, or as a copy; no savepoint stays."""
