"""Removes rows of state when their time to live, their window or their session is over.

`expiry` is for state tables and processors' variables, `ends` for operators in one line. Only a call of the row's shard
removes it. The pointer's row says when Spark must make one even without rows; else the row stays until the next call
with rows. Reads skip rows that have expired.
"""
