"""The metrics that Spark computes from the measures of a micro-batch's calls.

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
from holdfast.spark_integration.client.recent import OperatorBatch

#: What the name of an observation begins with; the operator's name follows.
OBSERVATION = "holdfast."
#: Spark's bitmap has no more, and fails a query that sets another.
_BITS = 1 << 15
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
    is_total : bool
        Whether it adds up what all calls have measured.
    """

    name: str
    type: DataType
    of: Callable[[Mapping[str, Column]], Column]
    is_total: bool = False


def _calls(measures: Mapping[str, Column]) -> Column:
    return F.count(measures["shard"])


def _shards(measures: Mapping[str, Column]) -> Column:
    """Return the number of distinct shards called. Used once only: its buffer takes 4 KB in each task.

    With more shards than it has bits, it is the number of calls, as if none were called twice.
    """
    distinct = F.bitmap_count(F.bitmap_construct_agg(measures["shard"] % _BITS))
    return F.when(F.max(measures["shard"]) >= _BITS, _calls(measures)).otherwise(distinct)


def _total(measure: str, unit: int = 1) -> Callable[[Mapping[str, Column]], Column]:
    def of(measures: Mapping[str, Column]) -> Column:
        total = F.sum(measures[measure])
        return total / unit if unit != 1 else total

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
    ObservedMetric("rows", _LONG, _total("rows"), is_total=True),
    ObservedMetric("rows_late", _LONG, _total("rows_late"), is_total=True),
    ObservedMetric("keys", _LONG, _total("keys"), is_total=True),
    ObservedMetric("keys_new", _LONG, _total("keys_new"), is_total=True),
    ObservedMetric("keys_removed", _LONG, _total("keys_removed"), is_total=True),
    ObservedMetric("state_rows_put", _LONG, _total("state_rows_put"), is_total=True),
    ObservedMetric("state_rows_deleted", _LONG, _total("state_rows_deleted"), is_total=True),
    ObservedMetric("timers_due", _LONG, _total("timers_due"), is_total=True),
    ObservedMetric("call_seconds", _DOUBLE, _total("call_us", _US), is_total=True),
    ObservedMetric("call_seconds_max", _DOUBLE, _largest("call_us", _US)),
    ObservedMetric("look_up_seconds", _DOUBLE, _total("look_up_us", _US), is_total=True),
    ObservedMetric("commit_seconds", _DOUBLE, _total("commit_us", _US), is_total=True),
    ObservedMetric("commit_bytes", _LONG, _total("commit_bytes"), is_total=True),
    ObservedMetric("stored_bytes", _LONG, _total("stored_bytes"), is_total=True),
    ObservedMetric("state_rows", _LONG, _total("state_rows"), is_total=True),
    ObservedMetric("state_bytes", _LONG, _total("state_bytes"), is_total=True),
    ObservedMetric("rows_max", _LONG, _largest("rows")),
    ObservedMetric("rows_max_shard", _LONG, _hottest),
    ObservedMetric("snapshot_lag_versions_max", _LONG, _largest("snapshot_lag_versions")),
    ObservedMetric("snapshot_lag_seconds_max", _DOUBLE, _largest("snapshot_lag_ms", _MS)),
    ObservedMetric("snapshot_bytes", _LONG, _total("snapshot_bytes"), is_total=True),
    ObservedMetric("snapshot_failures", _LONG, _total("snapshot_failures"), is_total=True),
    ObservedMetric("servers_unanswered", _LONG, _total("unanswered"), is_total=True),
)


#: By metric, what state servers remember it by, and in which unit: what they add up over an executor's shards.
_REMEMBERED: Mapping[str, tuple[str, int]] = {
    "call_seconds": ("call_us", _US),
    "look_up_seconds": ("look_up_us", _US),
    "commit_seconds": ("commit_us", _US),
    "snapshot_lag_versions_max": ("snapshot_lag_versions", 1),
    **{name: (name, 1) for name in ("rows", "rows_late", "keys", "keys_new", "keys_removed", "timers_due")},
    **{name: (name, 1) for name in ("state_rows_put", "state_rows_deleted", "state_rows", "state_bytes")},
    **{name: (name, 1) for name in ("commit_bytes", "stored_bytes")},
}


def is_observed(values: Mapping[str, Any]) -> bool:
    """Tell whether observed values are ours: a query may observe something of its own under such a name."""
    return all(metric.name in values for metric in OBSERVED)


def of_remembered(batch: OperatorBatch) -> dict[str, Any]:
    """Return the metrics of a micro-batch that state servers remember; null where only Spark's progress knows."""
    found: dict[str, Any] = {metric.name: None for metric in OBSERVED}
    for metric, (measure, unit) in _REMEMBERED.items():
        value = batch.values.get(measure)
        found[metric] = value / unit if value is not None and unit != 1 else value
    return found | {"shards": batch.shards}


def observed_columns(row: Column) -> list[Column]:
    """Return the aggregates to observe, over a column that holds rows of measures, and nulls."""
    measures: dict[str, Any] = {name: row[place] for place, name in enumerate(MEASURES)}
    return [metric.of(measures).cast(metric.type).alias(metric.name) for metric in OBSERVED]


def of_each_shard_once(values: Mapping[str, Any]) -> dict[str, Any]:
    """Scale the observed values as if each shard had been called once.

    Spark evaluates a shard again for a second action on the same micro-batch, or after it lost an executor; where it
    observes both, a total is the mean of all calls times the number of shards.
    """
    shards, calls = values["shards"], values["calls"]
    if not calls or shards == calls:
        return dict(values)
    once = dict(values)
    for metric in OBSERVED:
        if metric.is_total and once[metric.name] is not None:
            total = once[metric.name] * shards / calls
            once[metric.name] = round(total) if isinstance(metric.type, LongType) else total
    return once
