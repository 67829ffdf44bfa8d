"""The per-key layer: functions that see one key at a time, over the state of whole shards.

Rows, states and timers are fetched, converted and written as columns, many keys at a time. The loop over keys does only
the work that the user's function needs.
"""
