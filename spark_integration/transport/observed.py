"""Output with the measures of shard calls beside it, which Spark observes before the output is unpacked.

::

    what a call returns      blob   measures           observe: sums of the measures, into the query's progress
                             ▒▒▒▒   null               │
                             ▒▒▒▒   null        ───────┴─▶ rows without measures ─▶ the output's own way on
                             null   [3, 1042, 877, …]

Spark evaluates the operator once, as before. ``observe`` has no state: checkpoint locations are the same with it and
without.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, DoubleType, LongType, StructField, StructType

from holdfast.spark_integration.client.measures import MEASURES, METRICS, CallMeasures, Metric
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.transport.output import Output, RowsOutput

#: What the name of an observation begins with; the operator's name follows.
OBSERVATION = "holdfast."
#: Spark's bitmap has no more, and fails a query that sets another.
_BITS = 1 << 15
#: The columns of the metrics.
FIELDS = tuple(StructField(one.name, LongType() if one.unit == 1 else DoubleType()) for one in METRICS)
MEASURED = "__holdfast_measured"
# Spark fails where rows of a processor with an event-time column are older than the watermark.
_NEVER_LATE = dt.datetime(9000, 1, 1, tzinfo=dt.UTC)


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


@dataclass(frozen=True)
class ObservedOutput(Output):
    """An output, and a row of measures for each call.

    `empty`: one row of the inner output's columns, to stand beside measures.
    """

    inner: Output
    observation: str
    empty: pa.RecordBatch

    @classmethod
    def of(cls, inner: Output, observation: str) -> ObservedOutput:
        """Return an output that is observed under a name."""
        types = arrow_schema(inner.sent_schema, "the output")
        columns = [pa.array([_zero(column.type)], column.type) for column in types]
        return cls(inner, observation, pa.RecordBatch.from_arrays(columns, schema=types))

    @property
    def sent_schema(self) -> StructType:
        return StructType([*self.inner.sent_schema, StructField(MEASURED, ArrayType(LongType()))])

    def send(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        return map(_beside_nothing, self.inner.send(batches))

    def send_at_once(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        return map(_beside_nothing, self.inner.send_at_once(batches))

    def send_measures(self, measures: CallMeasures) -> Iterator[pd.DataFrame]:
        for frame in RowsOutput(self.inner.sent_schema).send([self.empty]):
            frame.insert(len(frame.columns), MEASURED, [measures.row()])
            yield frame

    def receive(self, frame: DataFrame) -> DataFrame:
        observed = frame.observe(self.observation, *observed_columns(F.col(MEASURED)))
        return self.inner.receive(observed.where(F.col(MEASURED).isNull()).drop(MEASURED))


def _beside_nothing(frame: pd.DataFrame) -> pd.DataFrame:
    frame.insert(len(frame.columns), MEASURED, None)
    return frame


def _zero(kind: pa.DataType) -> Any:
    """Return a value of a type, such that frames with it have the types of frames without."""
    if pa.types.is_boolean(kind):
        return False
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return 0
    if pa.types.is_decimal(kind):
        return Decimal(0)
    if pa.types.is_timestamp(kind):
        return _NEVER_LATE if kind.tz is not None else _NEVER_LATE.replace(tzinfo=None)
    if pa.types.is_duration(kind):
        return dt.timedelta(0)
    if pa.types.is_date(kind):
        return _NEVER_LATE.date()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return ""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return b""
    if pa.types.is_struct(kind):
        return {part.name: _zero(part.type) for part in kind}
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        return []
    return None
