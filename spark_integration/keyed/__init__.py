"""Calls functions key by key; rows, states and timers are read, converted and written for many keys at a time."""
