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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, LongType, StructField, StructType

from holdfast.spark_integration.client.measures import CallMeasures
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.transport.observed_metrics import observed_columns
from holdfast.spark_integration.transport.output import Output, RowsOutput

MEASURED = "__holdfast_measured"
# Spark fails where rows of a processor with an event-time column are older than the watermark.
_NEVER_LATE = dt.datetime(9000, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True)
class ObservedOutput(Output):
    """An output, and a row of measures for each call.

    Attributes
    ----------
    inner : Output
    observation : str
        Its name in the query's progress.
    empty : pyarrow.RecordBatch
        One row of the inner output's columns, to stand beside measures.
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
