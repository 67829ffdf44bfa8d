"""Durability: what of a shard's state is stored where it outlives the machine, and how it comes back.

The layer between a shard's versions and an object storage: the storage boundary itself, commit objects, snapshots,
restore and retention. Everything that it stores is immutable and has a unique name.
"""
