"""What sinks of Parquet files share: written whole, found again, removed."""
