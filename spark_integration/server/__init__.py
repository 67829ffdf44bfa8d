"""The state server, one process per executor, for work that no micro-batch should wait for."""
