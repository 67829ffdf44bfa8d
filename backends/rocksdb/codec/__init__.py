"""Typed columns as the bytes of RocksDB's keys and values, and back."""
