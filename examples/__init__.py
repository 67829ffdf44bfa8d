"""Example programs, by folder."""
