"""A query's checkpoint location, read without Spark: its logs, and the state with pointers."""
