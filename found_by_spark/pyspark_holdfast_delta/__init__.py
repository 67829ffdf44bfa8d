"""Where Spark finds the data source ``holdfast-delta`` by itself: see `pyspark_holdfast`."""

from holdfast.spark_integration.sink_source import DeltaSource as DefaultSource

__all__ = ["DefaultSource"]
