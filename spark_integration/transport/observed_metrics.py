"""The metrics that Spark computes from the measures of a micro-batch's calls, into the query's progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DoubleType, LongType, StructField

from holdfast.spark_integration.client.measures import MEASURES, METRICS, Metric

#: What the name of an observation begins with; the operator's name follows.
OBSERVATION = "holdfast."
#: Spark's bitmap has no more, and fails a query that sets another.
_BITS = 1 << 15
#: The columns of the metrics.
FIELDS = tuple(StructField(one.name, LongType() if one.unit == 1 else DoubleType()) for one in METRICS)


def observed_columns(row: Column) -> list[Column]:
    """Return the aggregates to observe, over a column that holds rows of measures, and nulls."""
    measures: dict[str, Any] = {name: row[place] for place, name in enumerate(MEASURES)}
    return [
        _aggregate(metric, measures).cast(field.dataType).alias(metric.name)
        for metric, field in zip(METRICS, FIELDS, strict=True)
    ]


def _aggregate(metric: Metric, measures: Mapping[str, Column]) -> Column:
    measure, shard = measures[metric.measure], measures["shard"]
    match metric.kind:
        case "shards":
            return _distinct(shard)
        case "calls":
            return F.count(shard)
        case "where":
            return F.max(F.struct(measure.alias("most"), shard.alias("shard")))["shard"]
        case "largest":
            found = F.max(measure)
        case _:
            found = F.sum(measure)
    return found / metric.unit if metric.unit != 1 else found


def _distinct(shard: Column) -> Column:
    """Return the number of distinct shards called. Used once only: its buffer takes 4 KB in each task.

    With more shards than it has bits, it is the number of calls, as if none were called twice.
    """
    distinct = F.bitmap_count(F.bitmap_construct_agg(shard % _BITS))
    return F.when(F.max(shard) >= _BITS, F.count(shard)).otherwise(distinct)


def is_observed(values: Mapping[str, Any]) -> bool:
    """Tell whether observed values are ours: a query may observe something of its own under such a name."""
    return all(metric.name in values for metric in METRICS)


def of_each_shard_once(values: Mapping[str, Any]) -> dict[str, Any]:
    """Scale the observed values as if each shard had been called once.

    Spark evaluates a shard again for a second action on the same micro-batch, or after it lost an executor. It observes
    both, so a total is the mean of all calls times the number of shards.
    """
    shards, calls = values["shards"], values["calls"]
    if not calls or shards == calls:
        return dict(values)
    once = dict(values)
    for metric in METRICS:
        if metric.is_sum and once[metric.name] is not None:
            total = once[metric.name] * shards / calls
            once[metric.name] = round(total) if metric.unit == 1 else total
    return once
