"""How output leaves its shard: the seam and its implementations.

* `PackedOutput`: blobs of Arrow data, which an extra Python stage unpacks: tables of vectorised functions.
* `RowsOutput`: pandas frames, which Spark converts, about 0.3 µs a row: functions by key.
* `OneByOneOutput`: the same for processors, whose frames Spark does not concatenate, so that NaN stays.

`holdfast.spark_integration.transport.observed` wraps any of them to send measures beside the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, StructField, StructType

from holdfast.spark_integration.client.measures import CallMeasures
from holdfast.spark_integration.spark_types import require_utf8
from holdfast.spark_integration.transport.packed import BLOB, BLOB_BYTES, PADDED_ROWS_MAX, write_blob
from holdfast.spark_integration.transport.python_stage import prepared


class Output(Protocol):
    """Carries a shard's output to Spark."""

    @property
    def sent_schema(self) -> StructType:
        """The columns that a shard's call returns to Spark."""

    def send(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        """Yield output as the frames that ``applyInPandasWithState`` expects; runs in a worker."""

    def send_at_once(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        """Do the same for large output, in frames that Spark's worker passes on instead of gathering them."""

    def send_measures(self, measures: CallMeasures) -> Iterator[pd.DataFrame]:
        """Yield the measures of a shard's call, if the output carries them; comes last."""
        return iter(())

    def receive(self, frame: DataFrame) -> DataFrame:
        """Return the rows of the output, given what the shards' calls return; runs on the driver."""


@dataclass(frozen=True)
class RowsOutput(Output):
    """Rows as Spark converts them.

    Attributes
    ----------
    schema : StructType
        Of the output.
    """

    schema: StructType

    @property
    def sent_schema(self) -> StructType:
        return self.schema

    def send(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        for batch in batches:
            columns = dict(enumerate(map(self._to_series, batch.schema.names, batch.columns)))
            frame = pd.DataFrame(columns, index=pd.RangeIndex(batch.num_rows), copy=False)
            frame.columns = pd.Index(batch.schema.names, dtype=object)
            yield frame

    def send_at_once(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        return self.send(batches)  # Spark's worker gathers by rows, so large frames pass through

    def receive(self, frame: DataFrame) -> DataFrame:
        return frame

    def _to_series(self, name: str, column: pa.Array) -> pd.Series[Any]:
        return _to_series(name, column)


@dataclass(frozen=True)
class OneByOneOutput(RowsOutput):
    """Rows in frames that Spark's worker converts one by one, as for ``transformWithState``: NaN stays."""

    def _to_series(self, name: str, column: pa.Array) -> pd.Series[Any]:
        if pa.types.is_floating(column.type) and _has_nan(column):
            # pandas knows NaN from null in Arrow's columns, but cannot concatenate them so that Spark takes them.
            return pd.Series(pd.arrays.ArrowExtensionArray(column))
        return _to_series(name, column)


def _to_series(name: str, column: pa.Array) -> pd.Series[Any]:
    """Return a column in a form that Spark converts without loss, including nulls and the full range of times.

    It also survives unchanged when ``applyInPandasWithState`` concatenates frames. Of NaN in a flat column Spark makes
    null.
    """
    if pa.types.is_temporal(column.type):
        return column.to_pandas(date_as_object=False)
    try:
        if pa.types.is_nested(column.type) and (_has_keys_of_parts(column.type) or _has_odd_floats(column)):
            return _in_parts(column)
        return column.to_pandas(integer_object_nulls=True, timestamp_as_object=True, maps_as_pydicts="strict")
    except (pa.ArrowException, UnicodeDecodeError):
        if not pa.types.is_string(column.type):
            require_utf8(pa.record_batch({name: column}), "the output")
            raise
        # Text that is not UTF-8 is no str. Of bytes Spark's worker makes such text again, unless it checks conversions.
        return column.cast(pa.binary()).to_pandas()


def _has_nan(column: pa.Array) -> bool:
    return bool(pc.any(pc.is_nan(column)).as_py())


def _has_odd_floats(column: pa.Array) -> bool:
    """Tell whether a column has floats, at any depth, whose NaN and null Arrow would confuse.

    NaN in a list of Python's floats is null to Arrow, while one of numpy's with 32 bits, as null is there, is NaN.
    """
    t = column.type
    if pa.types.is_floating(t):
        return _has_nan(column) or (t == pa.float32() and column.null_count > 0)
    if pa.types.is_map(t):
        return _has_odd_floats(column.keys) or _has_odd_floats(column.items)
    if pa.types.is_list(t):
        return _has_odd_floats(column.flatten())
    return pa.types.is_struct(t) and any(map(_has_odd_floats, column.flatten()))


def _has_keys_of_parts(t: pa.DataType) -> bool:
    """Tell whether a type has maps, at any depth, whose keys are dicts or lists in Python, so not hashable."""
    if pa.types.is_map(t) and pa.types.is_nested(t.key_type):
        return True
    return any(_has_keys_of_parts(t.field(i).type) for i in range(t.num_fields))


def _in_parts(column: pa.Array) -> pd.Series[Any]:
    """Return a nested column as Python values; long lists of numbers only if they need it."""
    if not pa.types.is_list(column.type) or not pa.types.is_floating(column.type.value_type):
        return pd.Series([_part(value, column.type) for value in column.to_pylist()], dtype=object)
    numbers = column.flatten()
    is_odd = pc.fill_null(pc.is_nan(numbers), numbers.type == pa.float32())
    rows = np.unique(pc.list_parent_indices(column).filter(is_odd))
    found = column.to_pandas()
    for row in rows.tolist():
        found.iat[row] = _part(column[row].as_py(), column.type)
    return found


class _Items(list[tuple[Any, Any]]):
    """A map with unhashable keys that looks like a dict to Spark."""

    def items(self) -> list[tuple[Any, Any]]:
        return self


def _part(value: Any, t: pa.DataType) -> Any:
    """Return a value of a nested column in a form whose NaN Arrow keeps."""
    if value is None:
        return None
    if pa.types.is_map(t):
        return _Items((_part(key, t.key_type), _part(item, t.item_type)) for key, item in value)
    if pa.types.is_list(t):
        return [_part(element, t.value_type) for element in value]
    if pa.types.is_struct(t):
        return {field.name: _part(value[field.name], field.type) for field in t}
    # What is no Python float is not taken for null.
    return np.float32(value) if pa.types.is_floating(t) and math.isnan(value) else value


@dataclass(frozen=True)
class PackedOutput(Output):
    """Rows as Arrow blobs.

    Attributes
    ----------
    schema : StructType
        Of the output.
    rows_each : int
        Maximum rows of an Arrow batch between Spark and Python.
    """

    schema: StructType
    rows_each: int

    @property
    def sent_schema(self) -> StructType:
        return StructType([StructField(BLOB, BinaryType())])

    def send(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        return pack_output(batches)

    def send_at_once(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        # The worker gathers frames until they have more rows than this, however large the rows: pad with nulls, which
        # `unpack_output` drops. Where rows have no limit, or hardly any, it gathers what a call returns, as it is told.
        for frame in pack_output(batches):
            yield frame.reindex(range(self.rows_each + 1)) if self.rows_each < PADDED_ROWS_MAX else frame

    def receive(self, frame: DataFrame) -> DataFrame:
        rows_each = self.rows_each

        def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return unpack_output(prepared(batches), rows_each)

        return frame.mapInArrow(unpack, self.schema)


def pack_output(batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
    """Yield an operator's output as the frames that ``applyInPandasWithState`` expects, one per blob.

    Spark pads the state to the number of output rows and converts value by value, so output costs per row. A few
    large blobs avoid that.
    """
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        rows_each = max(1, int(batch.num_rows * BLOB_BYTES / max(batch.nbytes, 1)))
        for start in range(0, batch.num_rows, rows_each):
            part = batch.slice(start, rows_each)
            if waiting and waiting_bytes + part.nbytes > BLOB_BYTES:
                yield _output_frame(waiting)
                waiting, waiting_bytes = [], 0
            waiting.append(part)
            waiting_bytes += part.nbytes
    if waiting:
        yield _output_frame(waiting)


def _output_frame(batches: list[pa.RecordBatch]) -> pd.DataFrame:
    return pd.DataFrame({BLOB: [write_blob(batches[0].schema, batches)]})


def unpack_output(batches: Iterable[pa.RecordBatch], rows_each: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of packed output, at most `rows_each` in a batch."""
    for batch in batches:
        for blob in batch.column(0).drop_null():
            yield from ipc.open_stream(blob.as_buffer()).read_all().to_batches(max_chunksize=rows_each)
