"""What Spark makes of the measures of a micro-batch's calls.

::

    call of shard 0 ─▶ CallMeasures ─┐ one row each, beside the output      observedMetrics of the query's progress
    call of shard 1 ─▶ CallMeasures ─┴────────────────────────────▶ observe ─▶ {rows: …, keys: …, commit_seconds: …}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DataType, DoubleType, LongType

from holdfast.spark_integration.client.measures import MEASURES

#: What the name of an observation begins with; the operator's name follows.
OBSERVATION = "holdfast."
_US = 1_000_000
_MS = 1_000


@dataclass(frozen=True)
class ObservedMetric:
    """One metric of an operator and micro-batch, as the query's progress shows it.

    Attributes
    ----------
    name : str
    type : DataType
    of : callable
        Returns it as an aggregate of measures by name.
    """

    name: str
    type: DataType
    of: Callable[[Mapping[str, Column]], Column]


def _calls(measures: Mapping[str, Column]) -> Column:
    return F.count(measures["shard"])


def _shards(measures: Mapping[str, Column]) -> Column:
    """Return the number of shards, whichever were called twice."""
    return F.bitmap_count(F.bitmap_construct_agg(measures["shard"]))


def _total(measure: str, unit: int = 1) -> Callable[[Mapping[str, Column]], Column]:
    """Return the sum over the shards.

    Spark evaluates a shard again for a second action on the same micro-batch, and after it lost an executor. So this is
    the mean of all calls times the number of shards.
    """

    def of(measures: Mapping[str, Column]) -> Column:
        total = F.sum(measures[measure]) * _shards(measures) / F.greatest(_calls(measures), F.lit(1))
        return total / unit if unit != 1 else F.round(total).cast("long")

    return of


def _largest(measure: str, unit: int = 1) -> Callable[[Mapping[str, Column]], Column]:
    def of(measures: Mapping[str, Column]) -> Column:
        return F.max(measures[measure]) / unit if unit != 1 else F.max(measures[measure])

    return of


def _hottest(measures: Mapping[str, Column]) -> Column:
    return F.max(F.struct(measures["rows"].alias("rows"), measures["shard"].alias("shard")))["shard"]


_LONG, _DOUBLE = LongType(), DoubleType()
#: What the query's progress shows of each operator.
OBSERVED: Sequence[ObservedMetric] = (
    ObservedMetric("shards", _LONG, _shards),
    ObservedMetric("calls", _LONG, _calls),
    ObservedMetric("rows", _LONG, _total("rows")),
    ObservedMetric("keys", _LONG, _total("keys")),
    ObservedMetric("keys_new", _LONG, _total("keys_new")),
    ObservedMetric("keys_removed", _LONG, _total("keys_removed")),
    ObservedMetric("state_rows_put", _LONG, _total("state_rows_put")),
    ObservedMetric("state_rows_deleted", _LONG, _total("state_rows_deleted")),
    ObservedMetric("timers_due", _LONG, _total("timers_due")),
    ObservedMetric("call_seconds", _DOUBLE, _total("call_us", _US)),
    ObservedMetric("call_seconds_max", _DOUBLE, _largest("call_us", _US)),
    ObservedMetric("look_up_seconds", _DOUBLE, _total("look_up_us", _US)),
    ObservedMetric("commit_seconds", _DOUBLE, _total("commit_us", _US)),
    ObservedMetric("commit_bytes", _LONG, _total("commit_bytes")),
    ObservedMetric("stored_bytes", _LONG, _total("stored_bytes")),
    ObservedMetric("state_rows", _LONG, _total("state_rows")),
    ObservedMetric("state_bytes", _LONG, _total("state_bytes")),
    ObservedMetric("rows_max", _LONG, _largest("rows")),
    ObservedMetric("rows_max_shard", _LONG, _hottest),
    ObservedMetric("snapshot_lag_versions_max", _LONG, _largest("snapshot_lag_versions")),
    ObservedMetric("snapshot_lag_seconds_max", _DOUBLE, _largest("snapshot_lag_ms", _MS)),
    ObservedMetric("snapshot_bytes", _LONG, _total("snapshot_bytes")),
    ObservedMetric("snapshot_failures", _LONG, _total("snapshot_failures")),
    ObservedMetric("servers_unanswered", _LONG, _total("unanswered")),
)


def observed_columns(row: Column) -> list[Column]:
    """Return the aggregates to observe, over a column that holds rows of measures, and nulls."""
    measures: dict[str, Any] = {name: row[place] for place, name in enumerate(MEASURES)}
    return [metric.of(measures).cast(metric.type).alias(metric.name) for metric in OBSERVED]
