"""Removes rows of state when their time to live is over, or what they count has ended.

`expiry` is for state tables and processors' variables, `ends` for operators in one line. Both remove rows only in a
call of the shard; the pointer's row says when Spark is to make one without rows, if ever.
"""
