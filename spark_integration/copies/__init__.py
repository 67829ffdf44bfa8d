"""New queries that continue another one at once: with other shards, or as a copy; no savepoint stays."""
