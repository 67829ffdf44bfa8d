"""The per-key layer: functions that see one key at a time, over the state of whole shards.

Rows, states and timers are fetched, converted and written in columns, many keys at a time; the loop over keys does
only what the user's function needs.
"""
