"""Registers the data source ``holdfast``: Spark imports packages named ``pyspark_…`` and registers `DefaultSource`."""

from holdfast.spark_integration.state_source.source import StateSource as DefaultSource

__all__ = ["DefaultSource"]
