"""Where Spark finds the data source ``holdfast-postgres`` by itself: see `pyspark_holdfast`."""

from holdfast.spark_integration.sink_source.formats import PostgresSource as DefaultSource

__all__ = ["DefaultSource"]
