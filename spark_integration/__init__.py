"""The bridge to Spark: how rows reach a shard, and how a shard takes part in a streaming query.

The top layer: transports, the shard call inside Spark's tasks, operators, the state server of an executor and its
client. It alone knows Spark; the layers below work without it.
"""
