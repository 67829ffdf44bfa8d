"""`rocksdb`: run files over RocksDB databases that hold cold rows."""
