"""Arrow columns as the Python values that a function is shown, made together where Spark and Arrow make each by itself.

`to_python` returns those of state: what ``fromInternal`` makes of Spark's rows. Two things work there that fail in
Spark: maps whose keys are or hold arrays, and the first day of Python's calendar.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections import namedtuple
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, Row, StructType, TimestampType

from holdfast.spark_integration import spark_versions

_TWO_DAYS = dt.timedelta(days=2)
# In microseconds.
_HOUR = 3_600_000_000
_DAY = 24 * _HOUR
# Python's calendar, since 1970; and what is no time in numpy's.
_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
_NAT = -(1 << 63)

#: Makes a row of the values of its columns.
RowMaker = Callable[[Iterable[Any]], Row]


@cache
def row_maker(*names: str) -> RowMaker:
    """Return a maker of rows with these columns: ``Row("a", "b")(*values)``, but faster to make and to read.

    Their class is one of their own, which has the names, and a column as an attribute where Spark's looks it up by its
    name. In all that it shows but ``type(row)`` it is Spark's; a copy, or a row that was pickled, is of Spark's.
    """
    at: Any = namedtuple("at", [f"column_{n}" for n in range(len(names))])  # type: ignore[misc]  # noqa: PYI024
    pairs = [*zip(names, map(partial(getattr, at), at._fields), strict=True)]
    # Of two columns of one name the first.
    own = {name: column for name, column in reversed(pairs) if not name.startswith("__") and not hasattr(Row, name)}
    return partial(tuple.__new__, type("Row", (_ShownRow,), {**own, "__fields__": Row(*names), **_AS_SPARKS}))


class _ShownRow(Row):
    """The base of all shown rows; one whose own attributes are used becomes Spark's."""

    __class__ = Row  # type: ignore[assignment]

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return _become_sparks(self).__dict__

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_become_sparks(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_become_sparks(self), name)


_AS_SPARKS = {"__module__": Row.__module__, "__doc__": Row.__doc__}
_set_class = object.__dict__["__class__"].__set__


def _become_sparks(row: Row) -> Row:
    names = row.__fields__
    _set_class(row, Row)
    row.__fields__ = names
    return row


def to_python(column: pa.Array, data_type: DataType) -> list[Any]:
    """Return the values as ``fromInternal`` would."""
    made: list[Any]
    if isinstance(data_type, StructType):
        parts = [to_python(c, f.dataType) for c, f in zip(column.flatten(), data_type, strict=True)]
        rows: Iterable[Any] = zip(*parts, strict=True) if parts else itertools.repeat((), len(column))
        made = list(map(row_maker(*data_type.names), rows))
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
        return spark_versions.state_binaries(plain(column))
    elif isinstance(data_type, TimestampType):
        return _local_times(column.view(pa.int64()), data_type)
    else:
        return plain(column)
    if column.null_count:
        return [value if valid else None for value, valid in zip(made, plain(column.is_valid()), strict=True)]
    return made


def plain(column: pa.Array) -> list[Any]:
    """Return what ``column.to_pylist()`` does, in less time."""
    t = column.type
    if not column.null_count and (pa.types.is_integer(t) or pa.types.is_floating(t)):
        return column.to_numpy().tolist()
    if pa.types.is_decimal(t):
        return [None if text is None else Decimal(text) for text in column.cast(pa.string()).to_pylist()]
    if pa.types.is_date32(t):
        days = column.view(pa.int32()).cast(pa.int64())
        return _by_numpy(days, "M8[D]", _FIRST // _DAY, _LAST // _DAY) or column.to_pylist()
    if pa.types.is_duration(t) and t.unit == "us":
        return _by_numpy(column.view(pa.int64()), "m8[us]", _NAT + 1, -_NAT - 1) or column.to_pylist()
    if pa.types.is_timestamp(t) and t.unit == "us":
        return _times(column) or column.to_pylist()
    return column.to_pylist()


def _by_numpy(numbers: pa.Array, unit: str, first: int = _FIRST, last: int = _LAST) -> list[Any]:
    """Return days or times by their numbers; an empty list if Python cannot represent one."""
    bounds = pc.min_max(numbers).as_py()
    if bounds["min"] is not None and not first <= bounds["min"] <= bounds["max"] <= last:
        return []
    found: list[Any] = numbers.fill_null(_NAT).to_numpy().view(unit).tolist()
    return found


def _times(column: pa.Array) -> list[Any]:
    times = _by_numpy(column.view(pa.int64()), "M8[us]")
    if column.type.tz is None or column.null_count == len(column):
        return times
    zone = pa.scalar(0, column.type).as_py().tzinfo
    try:
        return [None if time is None else zone.fromutc(time.replace(tzinfo=zone)) for time in times]
    except (OverflowError, ValueError):  # at the end of Python's calendar
        return []


def _stretches(column: pa.Array, flat: list[Any]) -> list[list[Any]]:
    """Split the flat elements of a list column by row; a null row has none."""
    ends = itertools.accumulate(pc.list_value_length(column).fill_null(0).to_pylist())
    return [flat[start:end] for start, end in itertools.pairwise(itertools.chain((0,), ends))]


def _as_key(value: Any) -> Any:
    """Return a value as a key of a dict, which neither a list nor a bytearray can be."""
    if isinstance(value, Row):
        return row_maker(*value.__fields__)(map(_as_key, value))
    if isinstance(value, list):
        return tuple(map(_as_key, value))
    return bytes(value) if isinstance(value, bytearray) else value


def _local_times(column: pa.Array, data_type: TimestampType) -> list[Any]:
    """Return times as Spark's own conversion does, which depends on this process's local time zone.

    Clocks change once in an hour at most. So where they agree at its beginning and its end, one number leads from all
    its times to the local ones.
    """
    numbers = column.drop_null().to_numpy()
    hours, of_hour = np.unique(numbers // _HOUR, return_inverse=True)
    are_few = 4 * len(hours) < len(numbers)
    shifts = [_shift_of_hour(hour * _HOUR, data_type) for hour in hours.tolist()] if are_few else [None]
    if None in shifts:
        return [_local_time(micros, data_type) for micros in plain(column)]
    times = iter((numbers + np.array(shifts, np.int64)[of_hour]).view("M8[us]").tolist())
    return [next(times) if valid else None for valid in plain(column.is_valid())] if column.null_count else list(times)


def _shift_of_hour(start: int, data_type: TimestampType) -> int | None:
    """Return the offset of local time in an hour; None if clocks change in it or repeat it."""
    try:
        first, last = (data_type.fromInternal(at) for at in (start, start + _HOUR - 1))
    except (OverflowError, ValueError, OSError):  # at the end of Python's calendar
        return None
    begins, ends = (int(np.datetime64(at, "us").astype(np.int64)) for at in (first, last))
    return None if first.fold or last.fold or ends - begins != _HOUR - 1 else begins - start


def _local_time(micros: Any, data_type: TimestampType) -> Any:
    """Return what ``fromInternal`` does, and that of the first day of the calendar too; None for None."""
    try:
        return data_type.fromInternal(micros)
    except ValueError:
        # It looks for a change of clocks on the day before, which Python does not have. They did not change in those
        # days, so two days later they show the same.
        return data_type.fromInternal(micros + 2 * _DAY) - _TWO_DAYS
