"""Durability: how a shard's state reaches storage that outlives the machine, and how it is restored."""
