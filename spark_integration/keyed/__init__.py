"""Calls functions key by key, over the state of whole shards.

Rows, states and timers are fetched, converted and written as columns, many keys at a time. The loop over keys only does
what the user's function needs.
"""
