"""Results in Parquet files, with a manifest for each micro-batch."""
