"""Registers the data source ``holdfast-delta``; see `pyspark_holdfast`."""

from holdfast.spark_integration.sink_source import DeltaSource as DefaultSource

__all__ = ["DefaultSource"]
