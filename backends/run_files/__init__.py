"""Versions as folders of run files, which every worker maps: `memory`, `filesystem`, and the runs of `rocksdb`."""
