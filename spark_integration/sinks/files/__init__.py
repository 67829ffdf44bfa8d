"""File sinks: the code that all Parquet-writing sinks share, and the plain Parquet sink."""
