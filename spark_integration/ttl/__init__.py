"""Removes rows of state after the end of their time to live, window or session.

`expiry` is for state tables and processors' variables, `ends` for one-line operators. A row is removed in a call of its
shard: when Spark calls the shard at the time in its pointer row or, without such a time, at the next call with rows.
Reads skip expired rows.
"""
