"""State as a Spark table: the data source ``holdfast`` of savepoints, queries and their changes."""
