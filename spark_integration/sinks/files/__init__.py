"""The common part of sinks that write Parquet files."""
