"""Durability: how a shard's state reaches storage that outlives the machine, and how it is restored.

The layer between a shard's versions and an object storage: the storage boundary itself, commit objects, snapshots,
restore and retention. Everything that it stores is immutable and has a unique name.
"""
