"""Removes rows of state after the end of their time to live, window or session.

`expiry` is for state tables and processors' variables, `ends` for one-line operators. Only a call of its shard removes
a row. The pointer row has the time at which Spark must call the shard even without rows; otherwise, the row stays until
the next call with rows. Reads skip expired rows.
"""
