"""Rows and keys as ``transformWithState`` shows them: `Row` objects, and output that is a `Row` again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.types import ArrayType, MapType, Row, StructType

from holdfast.backends.arrow.rows import IntArray, one_chunk
from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration.keyed.frames import in_zone
from holdfast.spark_integration.keyed.group_state import copier
from holdfast.spark_integration.keyed.shown_values import plain, row_maker
from holdfast.spark_integration.keyed.slabs import KeySlabs
from holdfast.spark_integration.spark_types import arrow_schema, require_nulls_allowed, require_utf8


def python_columns(rows: pa.Table, timezone: str) -> list[list[Any]]:
    """Return each column as Arrow's Python values, with timestamps in the session's time zone."""
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
    """The rows of a shard in one micro-batch, as `Row` objects by key.

    Parameters
    ----------
    rows, order, starts, rows_each
        See `KeySlabs`.
    timezone : str
        The session's.
    """

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


class OutputRows:
    """Gathers the rows that a processor returns for many keys, and converts them together.

    Parameters
    ----------
    schema : StructType
        Of the output.
    rows_each : int
        A batch is yielded once it has so many rows.

    Attributes
    ----------
    failed_key : tuple or None
        After a failed conversion, the key whose row caused it.
    """

    def __init__(self, schema: StructType, rows_each: int) -> None:
        self._arrow = arrow_schema(schema, "outputStructType", keep_not_null=True)
        self._names = schema.names
        self._is_flat = not any(isinstance(f.dataType, (ArrayType, MapType, StructType)) for f in schema)
        # Spark converts a key's rows before it calls the next key, which may then change what they hold.
        self._copied = copier(schema)
        self._rows_each = rows_each
        self._rows: list[tuple[Any, ...]] = []
        self._keys: list[tuple[Any, ...]] = []
        self.failed_key: tuple[Any, ...] | None = None

    def add_all(self, returned: Any, key: tuple[Any, ...]) -> Iterator[pa.RecordBatch]:
        """Iterate over what the processor returned for a key; yield batches as they fill.

        Raises
        ------
        AttributeError, PySparkTypeError
            An element is no `Row` with names.
        SchemaMismatchError
            A row lacks a column of the output, or has null where that is NOT NULL.
        pyarrow.ArrowException
            A value does not fit its column.
        """
        rows, keys, is_flat, copied = self._rows, self._keys, self._is_flat, self._copied
        names = self._names, tuple(self._names)  # of a row made with its names, and of one made by a row of names
        for row in returned:
            is_ready = row.__class__ is Row and is_flat and getattr(row, "__fields__", ()) in names
            values = row if is_ready and len(row) == len(self._names) else self._values(row.asDict(True))
            rows.append(values if copied is None else tuple(map(copied, values)))
            keys.append(key)
            if len(rows) >= self._rows_each:
                yield from self.finish()
                rows, keys = self._rows, self._keys

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield what is left."""
        rows, keys, self._rows, self._keys = self._rows, self._keys, [], []
        if rows:
            yield self._converted(rows, keys)

    def _values(self, row: dict[str, Any]) -> tuple[Any, ...]:
        missing = [name for name in self._names if name not in row]
        if missing:
            raise SchemaMismatchError(
                "the processor returned a row without a column that outputStructType declares: None for null",
                missing=missing,
                given=sorted(map(str, row)),
            )
        return tuple(row[name] for name in self._names)

    def _converted(self, rows: list[tuple[Any, ...]], keys: list[tuple[Any, ...]]) -> pa.RecordBatch:
        """Convert rows together; if that fails, halve them until the row that fails by itself is found."""
        try:
            return self._convert(rows)
        except Exception:  # raised by Arrow, or by the values themselves
            if len(rows) == 1:
                self.failed_key = keys[0]
                raise
        middle = len(rows) // 2
        halves = self._converted(rows[:middle], keys[:middle]), self._converted(rows[middle:], keys[middle:])
        return pa.concat_batches(halves)

    def _convert(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        columns = []
        for field, values in zip(self._arrow, zip(*rows, strict=True), strict=True):
            column = pa.array(values, field.type)
            require_nulls_allowed(column, field, "the processor")
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)
