"""All of holdfast's data sources, where Spark does not find them by itself.

Apart from `holdfast.spark_integration.sink_source.formats`, which Spark imports in a process of its own whenever it
looks for a source or makes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException

from holdfast.spark_integration.sink_source.formats import SINK_SOURCES
from holdfast.spark_integration.state_source.reading import register as register_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make ``format("holdfast")`` and the sinks' formats known to a session.

    Where Spark finds them by itself, this changes nothing.
    """
    register_state(spark)
    for source in SINK_SOURCES:
        try:
            spark.dataSource.register(source)
        except AnalysisException as exc:
            if exc.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise
