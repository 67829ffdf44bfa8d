"""Registers the data source ``holdfast-kafka``; see `pyspark_holdfast`."""

from holdfast.spark_integration.sink_source import KafkaSource as DefaultSource

__all__ = ["DefaultSource"]
