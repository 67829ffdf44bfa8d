"""Where Spark finds the data source ``holdfast`` by itself.

Spark imports what is called ``pyspark_…`` on the driver's path, and registers its ``DefaultSource``.
"""

from holdfast.spark_integration.state_source.source import StateSource as DefaultSource

__all__ = ["DefaultSource"]
