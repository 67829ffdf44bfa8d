"""Converts rows, keys and output between Arrow and the two processor APIs.

``transformWithState`` passes and takes `Row` objects, ``transformWithStateInPandas`` pandas DataFrames (frames).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkValueError
from pyspark.sql.types import ArrayType, MapType, Row, StructType

from holdfast.backends.arrow.rows import IntArray, one_chunk
from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.keyed.frame_blocks import Array
from holdfast.spark_integration.keyed.frames import (
    FrameFormat,
    GatheredOutput,
    KeyFrames,
    OutputFrames,
    in_zone,
    key_tuples,
)
from holdfast.spark_integration.keyed.pandas_with_state import copier
from holdfast.spark_integration.keyed.python_values import plain, row_maker
from holdfast.spark_integration.keyed.slabs import KeyOrder, KeySlabs
from holdfast.spark_integration.spark_types import arrow_schema, require_nulls_allowed, require_utf8

KeyTuple = tuple[Any, ...]


def python_columns(rows: pa.Table, timezone: str) -> list[list[Any]]:
    """Convert each column to Python values as Arrow does, with timestamps in the session's time zone."""
    columns = []
    for name, chunked in zip(rows.column_names, rows.columns, strict=True):
        column = one_chunk(chunked)
        target = in_zone(column.type, timezone)
        try:
            columns.append(plain(column if column.type == target else column.cast(target)))
        except UnicodeDecodeError:
            require_utf8(pa.table({name: column}), "the input")
            raise
    return columns


class KeyRowObjects(KeySlabs[Row]):
    """The rows of a shard in one micro-batch, as `Row` objects by key."""

    def __init__(self, rows: pa.Table, order: IntArray, starts: IntArray, rows_each: int, timezone: str) -> None:
        super().__init__(rows, order, starts, rows_each)
        self._timezone = timezone
        self._make_row = row_maker(*rows.column_names)

    def cut(self, rows: pa.Table, bounds: IntArray) -> Iterator[Iterator[Row]]:
        made = list(self.convert(rows))
        for start, end in itertools.pairwise(bounds.tolist()):
            yield iter(made[start:end])

    def convert(self, rows: pa.Table) -> Iterator[Row]:
        return map(self._make_row, zip(*python_columns(rows, self._timezone), strict=True))


def named_values(row: Any) -> dict[str, Any]:
    """Return a row's values by column name. Raises Spark's `AttributeError` or `PySparkTypeError`."""
    try:
        columns: dict[str, Any] = row.asDict(True)
    except AttributeError as exc:
        raise AttributeError(f"a processor must return Rows with names, such as Row(user=key[0], n=1): {exc}") from exc
    return columns


class OutputRows:
    """Converts the output rows of many keys, `rows_each` at a time; `failed_key` is the key of a row that fails."""

    def __init__(self, schema: StructType, rows_each: int) -> None:
        self._arrow = arrow_schema(schema, "outputStructType", keep_not_null=True)
        self._names = schema.names
        #: Field names of ``Row(n=1)``, a list, and of ``Row('n')(1)``, a tuple.
        self._as_declared = self._names, tuple(self._names)
        self._is_flat = not any(isinstance(f.dataType, (ArrayType, MapType, StructType)) for f in schema)
        # Spark converts a key's rows before the next key's call, which may change objects that the rows share.
        self._copied = copier(schema)
        self._rows_each = rows_each
        self._rows: list[tuple[Any, ...]] = []
        self._keys: list[tuple[Any, ...]] = []
        self.failed_key: tuple[Any, ...] | None = None

    def add_all(self, returned: Any, key: tuple[Any, ...]) -> Iterator[pa.RecordBatch]:
        """Add a processor's output for a key; yield batches as they fill."""
        rows, keys, is_flat, copied = self._rows, self._keys, self._is_flat, self._copied
        for row in returned:
            is_ready = row.__class__ is Row and is_flat and getattr(row, "__fields__", ()) in self._as_declared
            values = row if is_ready and len(row) == len(self._names) else self._values(named_values(row))
            rows.append(values if copied is None else tuple(map(copied, values)))
            keys.append(key)
            if len(rows) >= self._rows_each:
                yield from self.finish()
                rows, keys = self._rows, self._keys

    def finish(self) -> Iterator[pa.RecordBatch]:
        rows, keys, self._rows, self._keys = self._rows, self._keys, [], []
        if rows:
            yield self._converted(rows, keys)

    def _values(self, row: dict[str, Any]) -> tuple[Any, ...]:
        missing = [name for name in self._names if name not in row]
        if missing:
            raise SchemaMismatchError(
                "the processor returned a row without a column that outputStructType declares: use None for null",
                missing=missing,
                given=sorted(map(str, row)),
            )
        return tuple(row[name] for name in self._names)

    def _converted(self, rows: list[tuple[Any, ...]], keys: list[tuple[Any, ...]]) -> pa.RecordBatch:
        """Convert the rows together; if that fails, bisect to find the row that fails."""
        try:
            return self._convert(rows)
        except Exception:  # from Arrow or from methods of the values
            if len(rows) == 1:
                self.failed_key = keys[0]
                raise
        middle = len(rows) // 2
        halves = self._converted(rows[:middle], keys[:middle]), self._converted(rows[middle:], keys[middle:])
        return pa.concat_batches(halves)

    def _convert(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        columns = []
        for column_type, values in zip(self._arrow, zip(*rows, strict=True), strict=True):
            column = pa.array(values, column_type.type)
            require_nulls_allowed(column, column_type, "the processor")
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)


class ProcessorOutput(GatheredOutput, Protocol):
    """Collects a processor's output for many keys."""

    def add_all(self, returned: Any, key: KeyTuple) -> Iterator[pa.RecordBatch]:
        """Add the output for a key; yield batches as they fill."""


class Exchange(Protocol):
    """The form of rows, keys and output in an API; sent to the workers."""

    def slabs(self, rows: pa.Table, order: KeyOrder) -> KeySlabs[Any]:
        """Return the rows by key, in the form over which ``handleInputRows`` iterates."""

    def keys(self, shown: pa.Table) -> list[KeyTuple]:
        """Return keys in the form that ``handleInputRows`` takes."""

    def output(self) -> ProcessorOutput:
        """Return a new, empty output."""


@dataclass(frozen=True)
class RowExchange:
    """The exchange of ``transformWithState``: `Row` objects."""

    output_schema: StructType
    timezone: str  #: The session's time zone
    rows_each: int  #: Rows per conversion

    def slabs(self, rows: pa.Table, order: KeyOrder) -> KeySlabs[Any]:
        return KeyRowObjects(rows, order.rows, order.starts, self.rows_each, self.timezone)

    def keys(self, shown: pa.Table) -> list[KeyTuple]:
        return list(zip(*python_columns(shown, self.timezone), strict=True))

    def output(self) -> ProcessorOutput:
        return OutputRows(self.output_schema, self.rows_each)

    def beside_initial_state(self) -> RowExchange:
        """Return the exchange for an initial state and the first micro-batch."""
        return self


@dataclass(frozen=True)
class FrameExchange:
    """The exchange of ``transformWithStateInPandas``: pandas frames."""

    output_schema: StructType
    frame_format: FrameFormat  #: The output's format
    rows_each: int  #: Maximum rows per frame
    #: Whether frames and keys are built from Python values
    from_python: bool = field(default_factory=spark_versions.makes_frames_anew)

    def slabs(self, rows: pa.Table, order: KeyOrder) -> KeySlabs[Any]:
        shown = replace(self.frame_format, from_python=self.from_python)
        return KeyFrames(rows, order.rows, order.starts, shown, self.rows_each)

    def keys(self, shown: pa.Table) -> list[KeyTuple]:
        if not self.from_python:
            return key_tuples(shown, self.frame_format)
        return list(zip(*map(self._key_column, shown.column_names, shown.columns), strict=True))

    def _key_column(self, name: str, column: pa.ChunkedArray) -> list[Any]:
        """Convert keys to Python values; times become pandas values, without a zone but in the session's time zone."""
        if pa.types.is_nested(column.type):
            return [value for (value,) in key_tuples(pa.table({name: column}), self.frame_format)]
        if pa.types.is_timestamp(column.type) or pa.types.is_duration(column.type):
            [series] = self.frame_format.to_series(pa.table({name: column}))
            return list(series)
        [values] = python_columns(pa.table({name: column}), self.frame_format.timezone)
        if self.frame_format.prefer_int_ext_dtype and pa.types.is_integer(column.type):
            number = column.type.to_pandas_dtype()
            return [None if value is None else number(value) for value in values]
        return values

    def beside_initial_state(self) -> FrameExchange:
        """Return the exchange for an initial state and the first micro-batch."""
        return replace(self, from_python=spark_versions.makes_frames_anew(beside_initial_state=True))

    def output(self) -> ProcessorOutput:
        return _ProcessorFrames(self.output_schema, self.frame_format, self.rows_each)


class _ProcessorFrames(OutputFrames):
    """Takes a processor's frames as Spark's worker does: reads each frame when it is yielded.

    So a processor may change a frame and yield it again. Extra columns are ignored, and booleans may become numbers.
    """

    keeps_booleans = True

    def __init__(self, schema: StructType, frame_format: FrameFormat, rows_each: int) -> None:
        super().__init__(schema, frame_format, rows_each)
        self._copied = copier(schema)

    def blocks_of(self, frame: pd.DataFrame) -> tuple[tuple[bytes, ...], list[Array]]:
        places, blocks = super().blocks_of(frame)
        return places, [self._copy_of(block) for block in blocks]

    def _copy_of(self, block: Any) -> Array:
        kept: Array = block.copy()
        if self._copied is not None and kept.dtype == np.object_ and isinstance(kept, np.ndarray):
            for at, value in np.ndenumerate(kept):
                kept[at] = self._copied(value)
        return kept

    def frames_of(self, returned: object) -> Iterator[pd.DataFrame]:
        return frames_of(returned)

    def places(self, labels: tuple[Any, ...]) -> list[int]:
        names = self.names
        if not (self._format.assign_cols_by_name and any(isinstance(label, str) for label in labels)):
            if len(labels) < len(names):
                raise SchemaMismatchError(
                    "the processor returned a frame with fewer columns than outputStructType declares",
                    columns=len(labels),
                    declared=len(names),
                )
            return list(range(len(names)))
        missing = [name for name in names if name not in labels]
        if missing:
            raise SchemaMismatchError(
                "the processor returned a frame without a column that outputStructType declares",
                missing=missing,
                given=sorted(map(str, labels)),
            )
        return [labels.index(name) for name in names]


def frames_of(returned: Any) -> Iterator[pd.DataFrame]:
    """Iterate over a key's output. Raises `PySparkValueError` if an element is not a DataFrame."""
    for frame in returned:
        if not isinstance(frame, pd.DataFrame):
            raise PySparkValueError(
                "Invalid return type. Please make sure that the UDF returns a pandas.DataFrame when the specified "
                f"return type is StructType. (an element is a {type(frame).__name__})"
            )
        yield frame
