"""The state server, one process for each executor: what no micro-batch should wait for."""
