"""Stateful queries to copy, each as Spark's `StatefulProcessor` and vectorised, for all keys of a shard at once.

::

    sessions.py        sessions of clicks in event time: list state, timers
    deduplication.py   each order once, however often it is delivered: value state with a time to live
    fraud.py           unconfirmed payments: map state, timers
    top_bids.py        the highest bids of each auction: list state
    migration.py       from Spark's own operator to holdfast, with its state

    entries.py         converts a list column to a table and back, for vectorised functions
    local.py           runs an example on this machine: files in, rows out
"""
