"""Arrow columns of state as the Python values that a function is shown: what ``fromInternal`` makes of Spark's rows.

Two things work here that fail in Spark: maps whose keys are or hold arrays, and the first day of Python's calendar.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, Row, StructType, TimestampType

from holdfast.spark_integration import spark_versions

_TWO_DAYS = dt.timedelta(days=2)


def make_row(names: Row, values: Iterable[Any]) -> Row:
    """Return ``names(*values)`` at a third of the cost; `names` is as ``Row("a", "b")``, with a value for each."""
    row: Row = tuple.__new__(Row, values)
    row.__dict__["__fields__"] = names
    return row


def to_python(column: pa.Array, data_type: DataType) -> list[Any]:
    """Return the values as ``fromInternal`` would."""
    made: list[Any]
    if isinstance(data_type, StructType):
        names = Row(*data_type.names)
        parts = [to_python(c, f.dataType) for c, f in zip(column.flatten(), data_type, strict=True)]
        rows: Iterable[Any] = zip(*parts, strict=True) if parts else itertools.repeat((), len(column))
        made = [make_row(names, values) for values in rows]
    elif isinstance(data_type, ArrayType):
        made = _stretches(column, to_python(column.flatten(), data_type.elementType))
    elif isinstance(data_type, MapType):
        entries = column.cast(pa.large_list(pa.struct([column.type.key_field, column.type.item_field])))
        keys, items = entries.flatten().flatten()
        shown = to_python(keys, data_type.keyType)
        if isinstance(data_type.keyType, (ArrayType, BinaryType, StructType)):
            shown = list(map(_as_key, shown))
        pairs = zip(shown, to_python(items, data_type.valueType), strict=True)
        made = [dict(some) for some in _stretches(entries, list(pairs))]
    elif isinstance(data_type, BinaryType):
        return spark_versions.state_binaries(_plain(column))
    elif isinstance(data_type, TimestampType):
        # Spark's own conversion, since it depends on this process's local time zone and its summer time.
        return [_local_time(micros, data_type) for micros in _plain(column.view(pa.int64()))]
    else:
        return _plain(column)
    if column.null_count:
        return [value if valid else None for value, valid in zip(made, _plain(column.is_valid()), strict=True)]
    return made


def _plain(column: pa.Array) -> list[Any]:
    t = column.type
    if not column.null_count and (pa.types.is_integer(t) or pa.types.is_floating(t)):
        return column.to_numpy().tolist()
    return column.to_pylist()


def _stretches(column: pa.Array, flat: list[Any]) -> list[list[Any]]:
    """Split the flat elements of a list column by row; a null row has none."""
    ends = itertools.accumulate(pc.list_value_length(column).fill_null(0).to_pylist())
    return [flat[start:end] for start, end in itertools.pairwise(itertools.chain((0,), ends))]


def _as_key(value: Any) -> Any:
    """Return a value as a key of a dict, which neither a list nor a bytearray can be."""
    if isinstance(value, Row):
        return make_row(value.__fields__, map(_as_key, value))
    if isinstance(value, list):
        return tuple(map(_as_key, value))
    return bytes(value) if isinstance(value, bytearray) else value


def _local_time(micros: Any, data_type: TimestampType) -> Any:
    """Return what ``fromInternal`` does, and that of the first day of the calendar too; None for None."""
    try:
        return data_type.fromInternal(micros)
    except ValueError:
        # It looks for a change of clocks on the day before, which Python does not have. They did not change in those
        # days, so two days later they show the same.
        return data_type.fromInternal(micros + _TWO_DAYS // dt.timedelta(microseconds=1)) - _TWO_DAYS
