"""Queries looked into from outside, without Spark: keys, their history, rows in pages, differences."""
