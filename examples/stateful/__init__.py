"""Stateful queries to copy: each by a `StatefulProcessor` of Spark's, and for all keys of a shard at once.

::

    sessions.py        clicks that belong together, in event time: list state, timers
    deduplication.py   each order once, however often it is delivered: value state with a time to live
    fraud.py           payments that nobody confirms: map state, timers
    top_bids.py        the highest bids of each auction: list state
    migration.py       from Spark's own operator to holdfast, with its state

    entries.py         a list column as a table and back, for the functions that see a shard
    local.py           runs an example on this machine: files in, rows out
"""
