"""Registers the data source ``holdfast-parquet``; see `pyspark_holdfast`."""

from holdfast.spark_integration.sink_source import ParquetSource as DefaultSource

__all__ = ["DefaultSource"]
