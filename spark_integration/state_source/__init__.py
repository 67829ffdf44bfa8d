"""State as a table of Spark's: the data source ``holdfast`` of savepoints and of queries, and of what changed."""
