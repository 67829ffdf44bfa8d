"""`rocksdb`: the state of a shard in one RocksDB database."""
