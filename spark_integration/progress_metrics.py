"""The metrics of a query's micro-batches as a DataFrame, from the query's own progress."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.transport.observed_metrics import OBSERVATION, OBSERVED, of_each_shard_once

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_SCHEMA = StructType(
    [
        StructField("operator", StringType(), False),
        StructField("batchId", LongType(), False),
        StructField("timestamp", TimestampType(), False),
        *[StructField(metric.name, metric.type) for metric in OBSERVED],
    ]
)


def metrics(query: StreamingQuery) -> DataFrame:
    """Return the metrics of a query's last micro-batches: one row for each operator of holdfast and micro-batch.

    Parameters
    ----------
    query : pyspark.sql.streaming.StreamingQuery
        As ``start`` returned it, running or not; over Spark Connect too.

    Returns
    -------
    pyspark.sql.DataFrame
        The columns ``operator``, ``batchId`` and ``timestamp`` (when the micro-batch began), then those that
        docs/metrics.md explains; oldest first. A micro-batch stands there once, however often it was attempted.

    Raises
    ------
    InvalidArgumentError
        `query` is no streaming query.

    Notes
    -----
    Cost: one request to the query; the micro-batches are those that Spark keeps:
    ``spark.sql.streaming.numRecentProgressUpdates``, 100 by default. What is returned does not change any more.
    """
    if not hasattr(query, "recentProgress"):
        raise InvalidArgumentError(
            "metrics are those of a streaming query: pass what writeStream…start() returned",
            given=type(query).__name__,
        )
    rows: dict[tuple[int, str], tuple[Any, ...]] = {}
    for progress in query.recentProgress:
        # As Spark writes it: 2026-11-25T02:15:47.412Z
        began = datetime.fromisoformat(progress["timestamp"])
        for name, observed in (progress["observedMetrics"] or {}).items():
            if name.startswith(OBSERVATION):
                operator, values = name.removeprefix(OBSERVATION), of_each_shard_once(observed.asDict())
                # A trigger without data repeats the number of the micro-batch before, and has observed nothing.
                if values["shards"] or (progress["batchId"], operator) not in rows:
                    shown = [values[metric.name] for metric in OBSERVED]
                    rows[progress["batchId"], operator] = (operator, progress["batchId"], began, *shown)
    return SparkSession.active().createDataFrame(list(rows.values()), _SCHEMA)
