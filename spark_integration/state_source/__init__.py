"""State as a Spark table: the data source ``holdfast`` for savepoints, queries and their changes."""
