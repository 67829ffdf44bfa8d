"""The vectorised layer: functions that see all keys of a shard as Arrow columns."""
