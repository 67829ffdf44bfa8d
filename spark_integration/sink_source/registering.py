"""All of holdfast's data sources, where Spark does not find them by itself.

Apart from `holdfast.spark_integration.sink_source.formats`, which Spark imports in a process of its own whenever it
looks for a source or makes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.spark_integration.sink_source.formats import SINK_SOURCES
from holdfast.spark_integration.state_source.reading import register_source
from holdfast.spark_integration.state_source.source import StateSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make ``format("holdfast")`` and the sinks' formats known to a session.

    Where Spark finds them by itself, this changes nothing.
    """
    for source in (StateSource, *SINK_SOURCES):
        register_source(spark, source)
