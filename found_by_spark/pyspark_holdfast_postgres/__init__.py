"""Registers the data source ``holdfast-postgres``; see `pyspark_holdfast`."""

from holdfast.spark_integration.sink_source import PostgresSource as DefaultSource

__all__ = ["DefaultSource"]
