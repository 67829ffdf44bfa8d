"""Encodes typed columns as the bytes of RocksDB's keys and values, and decodes them."""
