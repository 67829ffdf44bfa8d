"""Versions as folders of run files that every worker maps: `memory`, `filesystem`, and the runs of `rocksdb`."""
