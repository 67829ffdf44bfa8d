"""`rocksdb`: run files, and below them RocksDB databases for what has gone cold."""
