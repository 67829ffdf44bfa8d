"""The metrics of a query's micro-batches as a DataFrame.

::

    the query's own progress          complete, wherever the executors are    if enabled when the query was defined
    this machine's state servers      the last micro-batches                  if executors run on this machine
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from holdfast.errors import InvalidArgumentError
from holdfast.settings import PREFIX
from holdfast.spark_integration.client.connection import over_executors, recent_batches
from holdfast.spark_integration.client.measures import of_group
from holdfast.spark_integration.transport.output import FIELDS, OBSERVATION, is_observed, of_each_shard_once

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_SCHEMA = StructType(
    [
        StructField("operator", StringType(), False),
        StructField("batchId", LongType(), False),
        StructField("timestamp", TimestampType(), False),
        *FIELDS,
    ]
)
_Rows = dict[tuple[int, str], tuple[Any, ...]]


def metrics(query: StreamingQuery) -> DataFrame:
    """Return the metrics of a query's last micro-batches, one row per holdfast operator and micro-batch.

    Parameters
    ----------
    query : pyspark.sql.streaming.StreamingQuery
        Running or not; also over Spark Connect.

    Returns
    -------
    pyspark.sql.DataFrame
        The columns ``operator``, ``batchId`` and ``timestamp`` (when the micro-batch began), then those that
        docs/metrics.md explains; oldest first. A micro-batch appears once, however often it was attempted.

    Raises
    ------
    InvalidArgumentError
        `query` is not a streaming query.

    Notes
    -----
    Sources: the query's progress, if the query was defined with ``spark.holdfast.metrics.inProgress``, for the
    micro-batches that Spark keeps (``spark.sql.streaming.numRecentProgressUpdates``). For others, this user's state
    servers on this machine (docs/metrics.md). These miss an executor's first micro-batch, executors that ended or run
    elsewhere, and clones; for a running micro-batch they count the finished shards. Null without the
    progress: ``calls``, ``call_seconds_max``, ``rows_max``, ``rows_max_shard``, ``snapshot_lag_seconds_max``,
    ``snapshot_bytes``, ``snapshot_failures`` and ``servers_unanswered``.

    Cost: one request to the query, and one per state server; a server that does not respond within two seconds is left
    out. The returned metrics are not updated.
    """
    if not hasattr(query, "recentProgress"):
        raise InvalidArgumentError(
            "metrics needs a streaming query: pass what writeStream…start() returned", given=type(query).__name__
        )
    session = SparkSession.active()
    rows = _from_servers(str(query.id), session.conf.get(f"{PREFIX}local.dir", None))
    for progress in query.recentProgress:
        # As Spark writes it: 2026-11-25T02:15:47.412Z
        began = datetime.fromisoformat(progress["timestamp"])
        for name, observed in (progress["observedMetrics"] or {}).items():
            if name.startswith(OBSERVATION) and is_observed(named := by_name(observed)):
                operator, values = name.removeprefix(OBSERVATION), of_each_shard_once(named)
                # A trigger without data repeats the previous micro-batch's number and observes nothing.
                if values["shards"] or (progress["batchId"], operator) not in rows:
                    rows[progress["batchId"], operator] = _row(operator, progress["batchId"], began, values)
    ordered = sorted(rows.values(), key=lambda row: (row[1], row[0]))
    return session.createDataFrame(ordered, _SCHEMA)


def _from_servers(query_id: str, local_dir: str | None) -> _Rows:
    """Return the metrics kept by this machine's state servers, by micro-batch and operator."""
    wanted = (batch for batch in recent_batches(local_dir) if batch.query == query_id and batch.batch_id is not None)
    rows: _Rows = {}
    # The newest attempt at a number comes last: a restarted query repeats its last micro-batch.
    for batch in reversed(over_executors(wanted)):
        assert batch.batch_id is not None
        operator = batch.operator.removesuffix(f"@{query_id}")  # appended if another query uses the name
        began = datetime.fromtimestamp(batch.batch_ms / 1_000, UTC)
        rows[batch.batch_id, operator] = _row(operator, batch.batch_id, began, of_group(batch.shards, batch.values))
    return rows


def _row(operator: str, batch_id: int, began: datetime, values: dict[str, Any]) -> tuple[Any, ...]:
    return (operator, batch_id, began, *(values[field.name] for field in FIELDS))


def by_name(observed: Row | None) -> dict[str, Any]:
    """Return observed metrics by name: classic Spark has them as columns, Spark Connect as values and their schema."""
    found: dict[str, Any] = observed.asDict() if observed is not None else {}
    if found.keys() == {"values", "schema"}:
        names = [column["name"] for column in found["schema"]["fields"]]
        return dict(zip(names, found["values"], strict=True))
    return found
