"""The parts of a shard that other packages use: its pointer, operator, task, storage and timeout."""
