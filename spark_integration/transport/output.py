"""Carries output from shards to Spark: the interface and its implementations.

* `PackedOutput`: Arrow blobs, which an extra Python stage unpacks; for tables of vectorised functions.
* `ListedOutput`: lists of rows, which Spark explodes; for the same tables if tasks are many.
* `RowsOutput`: pandas frames, which Spark converts, in about 0.3 µs per row; for functions by key.
* `OneByOneOutput`: the same for processors, whose frames Spark does not concatenate, so that NaN survives.
* `ObservedOutput`: adds the measures of shard calls to any of these; Spark observes them before it unpacks the output.

::

    a call's result          blob   measures           observe: sums of the measures, in the query's progress
                             ▒▒▒▒   null               │
                             ▒▒▒▒   null        ───────┴─▶ rows without measures ─▶ the inner output's `receive`
                             null   [3, 1042, 877, …]

Spark evaluates the operator once, with or without measures. ``observe`` has no state, so it does not change checkpoint
locations.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol, Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
from pandas.api.extensions import ExtensionArray, ExtensionDtype
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, BinaryType, DoubleType, LongType, StructField, StructType

from holdfast.spark_integration.client.measures import MEASURES, METRICS, CallMeasures, Metric
from holdfast.spark_integration.spark_types import arrow_schema, require_utf8
from holdfast.spark_integration.transport.packed import BLOB, BLOB_BYTES, PADDED_ROWS_MAX, write_blob
from holdfast.spark_integration.transport.python_stage import prepared

#: With this many shards, and as many tasks per micro-batch, unpacking blobs in a Python stage costs more than it saves.
#: With two shards, lists took 1.06 and 1.09 times the CPU of blobs for 1,000 rows, and 1.09 times for a million, in the
#: JVM. Once the JVM has compiled the code, wall times draw: 0.95 and 1.00 times for 1,000 rows, 1.03 and 1.08 for
#: 100,000, and 0.92 for a million (one idle run).
MANY_SHARDS = 64
#: Rows per list: the JVM holds a list as an array of rows, each of 24 bytes or more, however small in Arrow.
_LISTED_ROWS_MAX = 1 << 17
#: The prefix of an observation's name; the operator's name follows.
OBSERVATION = "holdfast."
#: The column that holds lists of rows.
ROWS = "__holdfast_rows"
#: The size of Spark's bitmap; setting a bit beyond it fails a query.
_BITS = 1 << 15
#: The columns of the metrics.
FIELDS = tuple(StructField(one.name, LongType() if one.unit == 1 else DoubleType()) for one in METRICS)
MEASURED = "__holdfast_measured"
# Spark fails if a processor with an event-time column returns rows older than the watermark.
_NEVER_LATE = dt.datetime(9000, 1, 1, tzinfo=dt.UTC)


class Output(Protocol):
    """Carries a shard's output to Spark."""

    @property
    def sent_schema(self) -> StructType:
        """The columns that a shard's call returns to Spark."""

    def send(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        """Yield output as the frames that ``applyInPandasWithState`` expects; runs in a worker."""

    def send_at_once(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        """Like `send`, for large output: yield frames that Spark's worker passes on instead of gathering."""
        return self.send(batches)  # the worker gathers only small frames

    def send_measures(self, measures: CallMeasures) -> Iterator[pd.DataFrame]:
        """Yield the measures of a shard's call if the output carries measures; called last."""
        return iter(())

    def receive(self, frame: DataFrame) -> DataFrame:
        """Return the output rows, given the results of the shards' calls; runs on the driver."""

    def for_shards(self, shards: int) -> Output:
        """Return the cheapest `Output` of the same rows for a stream with this many shards."""
        return self


@dataclass(frozen=True)
class RowsOutput(Output):
    """Rows in pandas frames, which Spark converts."""

    schema: StructType  #: The output's columns

    @property
    def sent_schema(self) -> StructType:
        return self.schema

    def send(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        for batch in batches:
            columns = dict(enumerate(map(self._to_series, batch.schema.names, batch.columns)))
            frame = pd.DataFrame(columns, index=pd.RangeIndex(batch.num_rows), copy=False)
            frame.columns = pd.Index(batch.schema.names, dtype=object)
            yield frame

    def receive(self, frame: DataFrame) -> DataFrame:
        return frame

    def _to_series(self, name: str, column: pa.Array) -> pd.Series[Any]:
        """Return a column in a form that Spark converts without loss, even after a concatenation of frames.

        In flat columns Spark turns NaN into null.
        """
        if pa.types.is_temporal(column.type):
            return column.to_pandas(date_as_object=False)
        try:
            if pa.types.is_nested(column.type) and (_has_unhashable_keys(column.type) or _has_odd_floats(column)):
                return _python_values(column)
            return column.to_pandas(integer_object_nulls=True, timestamp_as_object=True, maps_as_pydicts="strict")
        except (pa.ArrowException, UnicodeDecodeError):
            if not pa.types.is_string(column.type):
                require_utf8(pa.record_batch({name: column}), "the output")
                raise
            # A str cannot hold invalid UTF-8. Spark's worker converts bytes back to such text, unless it checks
            # conversions.
            return column.cast(pa.binary()).to_pandas()


@dataclass(frozen=True)
class OneByOneOutput(RowsOutput):
    """Rows in frames that Spark's worker converts one by one, as for ``transformWithState``: NaN survives."""

    def _to_series(self, name: str, column: pa.Array) -> pd.Series[Any]:
        if pa.types.is_floating(column.type) and _has_nan(column):
            # Arrow-backed columns distinguish NaN from null, but Spark cannot take them concatenated.
            return pd.Series(pd.arrays.ArrowExtensionArray(column))
        return super()._to_series(name, column)


def _has_nan(column: pa.Array) -> bool:
    return bool(pc.any(pc.is_nan(column)).as_py())


def _has_odd_floats(column: pa.Array) -> bool:
    """Return whether a column has floats, at any depth, whose NaN and null Arrow would confuse."""
    t = column.type
    if pa.types.is_floating(t):
        return _has_nan(column) or (t == pa.float32() and column.null_count > 0)
    if pa.types.is_map(t):
        return _has_odd_floats(column.keys) or _has_odd_floats(column.items)
    if pa.types.is_list(t):
        return _has_odd_floats(column.flatten())
    return pa.types.is_struct(t) and any(map(_has_odd_floats, column.flatten()))


def _has_unhashable_keys(t: pa.DataType) -> bool:
    """Return whether a type has maps, at any depth, whose keys become dicts or lists, which are not hashable."""
    if pa.types.is_map(t) and pa.types.is_nested(t.key_type):
        return True
    return any(_has_unhashable_keys(t.field(i).type) for i in range(t.num_fields))


def _python_values(column: pa.Array) -> pd.Series[Any]:
    """Convert a nested column to Python values; in lists of floats, only the rows that need it."""
    if not pa.types.is_list(column.type) or not pa.types.is_floating(column.type.value_type):
        return pd.Series([_python_value(value, column.type) for value in column.to_pylist()], dtype=object)
    numbers = column.flatten()
    is_odd = pc.fill_null(pc.is_nan(numbers), numbers.type == pa.float32())
    rows = np.unique(pc.list_parent_indices(column).filter(is_odd))
    found = column.to_pandas()
    for row in rows.tolist():
        found.iat[row] = _python_value(column[row].as_py(), column.type)
    return found


class _Items(list[tuple[Any, Any]]):
    """A map with unhashable keys that looks like a dict to Spark."""

    def items(self) -> list[tuple[Any, Any]]:
        return self


def _python_value(value: Any, t: pa.DataType) -> Any:
    """Convert a nested value to a form in which Arrow keeps NaN."""
    if value is None:
        return None
    if pa.types.is_map(t):
        return _Items((_python_value(key, t.key_type), _python_value(item, t.item_type)) for key, item in value)
    if pa.types.is_list(t):
        return [_python_value(element, t.value_type) for element in value]
    if pa.types.is_struct(t):
        return {field.name: _python_value(value[field.name], field.type) for field in t}
    # Only a Python float can be mistaken for null.
    return np.float32(value) if pa.types.is_floating(t) and math.isnan(value) else value


@dataclass(frozen=True)
class _TableOutput(Output):
    """Tables, sent as Spark rows that each hold many output rows."""

    schema: StructType  #: The output's columns
    rows_each: int  #: Maximum rows of an Arrow batch between Spark and Python

    def send_at_once(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        # The worker gathers frames until they exceed `rows_each` rows, however large: pad with nulls, which are dropped
        # behind it. With hardly any limit on rows, padding would cost too much, and the worker gathers all frames.
        for frame in self.send(batches):
            yield frame.reindex(range(self.rows_each + 1)) if self.rows_each < PADDED_ROWS_MAX else frame


@dataclass(frozen=True)
class PackedOutput(_TableOutput):
    """Rows as Arrow blobs."""

    @property
    def sent_schema(self) -> StructType:
        return StructType([StructField(BLOB, BinaryType())])

    def send(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        return pack_output(batches)

    def receive(self, frame: DataFrame) -> DataFrame:
        rows_each = self.rows_each
        return frame.mapInArrow(lambda batches: unpack_output(prepared(batches), rows_each), self.schema)

    def for_shards(self, shards: int) -> Output:
        # Each shard is a task, and each task starts the stage that unpacks. Lists lose column metadata.
        is_plain = not any(field.metadata for field in self.schema)
        return ListedOutput(self.schema, self.rows_each) if shards >= MANY_SHARDS and is_plain else self


class _ArrowColumnType(ExtensionDtype):
    """The dtype of `_ArrowColumn`; columns concatenated with it, such as padding, take this dtype."""

    name = "arrow column"
    type = object
    # Arrow handles nulls; pandas would treat a column of nothing else as untyped.
    _can_hold_na = False
    _metadata = ("arrow",)

    def __init__(self, arrow: pa.DataType) -> None:
        self.arrow = arrow

    @classmethod
    def construct_array_type(cls) -> Any:
        return _ArrowColumn

    def _get_common_dtype(self, dtypes: Sequence[Any]) -> Self:
        return self


class _ArrowColumn(ExtensionArray):
    """A column of one Arrow array, which Spark's worker passes on unchanged.

    The worker concatenates the frames of a task, padding with null rows, and takes the column's Arrow array. pandas'
    own Arrow columns fail: concatenated, they have several chunks, which Spark does not accept.
    """

    def __init__(self, arrow: pa.Array) -> None:
        self.arrow = arrow

    @classmethod
    def _from_sequence(cls, scalars: Sequence[Any], *, dtype: _ArrowColumnType, copy: bool = False) -> Self:
        return cls(pa.array(scalars, dtype.arrow, from_pandas=True))

    @classmethod
    def _concat_same_type(cls, to_concat: Sequence[_ArrowColumn]) -> Self:
        return cls(pa.concat_arrays([column.arrow for column in to_concat]))

    @property
    def dtype(self) -> _ArrowColumnType:
        return _ArrowColumnType(self.arrow.type)

    def __len__(self) -> int:
        return len(self.arrow)

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.Array:  # noqa: A002  pyarrow's name
        return self.arrow

    def __getitem__(self, item: Any) -> Any:
        return self.arrow[item]

    def map(self, mapper: object, na_action: object = None) -> Self:
        return self  # Spark's worker would convert pandas values; these need no conversion

    def copy(self) -> Self:
        return self  # immutable

    def take(self, indices: Any, *, allow_fill: bool = False, fill_value: Any = None) -> Self:
        rows = np.asarray(indices, np.int64)
        return type(self)(self.arrow.take(pa.array(rows, mask=rows < 0)))


@dataclass(frozen=True)
class ListedOutput(_TableOutput):
    """Rows in a few long lists, which Spark's worker passes on and the JVM unpacks without Python."""

    @property
    def sent_schema(self) -> StructType:
        return StructType([StructField(ROWS, ArrayType(self.schema, containsNull=False))])

    def send(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        (kind,) = arrow_schema(self.sent_schema, "the output").types
        for part in (part for batch in batches for part in _parts(batch, _LISTED_ROWS_MAX)):
            rows = pa.StructArray.from_arrays(part.columns, fields=list(kind.value_type))
            listed = pa.ListArray.from_arrays(pa.array([0, len(rows)], pa.int32()), rows, type=kind)
            yield pd.DataFrame({ROWS: _ArrowColumn(listed)})

    def receive(self, frame: DataFrame) -> DataFrame:
        return frame.select(F.inline(ROWS))


def pack_output(batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
    """Yield output as the frames that ``applyInPandasWithState`` expects, one per large blob.

    Blobs are few because Spark pads the state to the number of output rows and converts it value by value.
    """
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        for part in _parts(batch, batch.num_rows):
            if waiting and waiting_bytes + part.nbytes > BLOB_BYTES:
                yield _output_frame(waiting)
                waiting, waiting_bytes = [], 0
            waiting.append(part)
            waiting_bytes += part.nbytes
    if waiting:
        yield _output_frame(waiting)


def _parts(batch: pa.RecordBatch, rows_max: int) -> Iterator[pa.RecordBatch]:
    """Split a batch into slices of at most `rows_max` rows and about `BLOB_BYTES`."""
    rows_each = max(1, min(rows_max, int(batch.num_rows * BLOB_BYTES / max(batch.nbytes, 1))))
    return (batch.slice(start, rows_each) for start in range(0, batch.num_rows, rows_each))


def _output_frame(batches: list[pa.RecordBatch]) -> pd.DataFrame:
    return pd.DataFrame({BLOB: [write_blob(batches[0].schema, batches)]})


def unpack_output(batches: Iterable[pa.RecordBatch], rows_each: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of packed output in batches of at most `rows_each`."""
    for batch in batches:
        for blob in batch.column(0).drop_null():
            yield from ipc.open_stream(blob.as_buffer()).read_all().to_batches(max_chunksize=rows_each)


def observed_columns(row: Column) -> list[Column]:
    """Return the aggregates to observe over a column of measures and nulls."""
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
    """Return the number of distinct shards called, or of calls if there are more shards than bits."""
    distinct = F.bitmap_count(F.bitmap_construct_agg(shard % _BITS))
    return F.when(F.max(shard) >= _BITS, F.count(shard)).otherwise(distinct)


def is_observed(values: Mapping[str, Any]) -> bool:
    """Return whether observed values are holdfast's: a query may use such a name for its own observation."""
    return all(metric.name in values for metric in METRICS)


def of_each_shard_once(values: Mapping[str, Any]) -> dict[str, Any]:
    """Scale observed values as if each shard had been called once.

    Spark evaluates a shard again for a second action, or after a lost executor, and observes both calls. So each shard
    counts with its mean.
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
    """An output with a row of measures for each call; `empty` fills that row's output columns."""

    inner: Output
    observation: str
    empty: pa.RecordBatch

    @classmethod
    def of(cls, inner: Output, observation: str) -> ObservedOutput:
        """Return an output whose measures are observed under a name."""
        types = arrow_schema(inner.sent_schema, "the output")
        columns = [pa.array([_zero(column.type)], column.type) for column in types]
        return cls(inner, observation, pa.RecordBatch.from_arrays(columns, schema=types))

    @property
    def sent_schema(self) -> StructType:
        return StructType([*self.inner.sent_schema, StructField(MEASURED, ArrayType(LongType()))])

    def send(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        return map(_without_measures, self.inner.send(batches))

    def send_at_once(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        return map(_without_measures, self.inner.send_at_once(batches))

    def send_measures(self, measures: CallMeasures) -> Iterator[pd.DataFrame]:
        for frame in RowsOutput(self.inner.sent_schema).send([self.empty]):
            frame.insert(len(frame.columns), MEASURED, [measures.row()])
            yield frame

    def receive(self, frame: DataFrame) -> DataFrame:
        observed = frame.observe(self.observation, *observed_columns(F.col(MEASURED)))
        return self.inner.receive(observed.where(F.col(MEASURED).isNull()).drop(MEASURED))


def _without_measures(frame: pd.DataFrame) -> pd.DataFrame:
    frame.insert(len(frame.columns), MEASURED, None)
    return frame


def _zero(kind: pa.DataType) -> Any:
    """Return a placeholder that leaves the types of a frame's columns unchanged."""
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
