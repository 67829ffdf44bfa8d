"""Converts Arrow columns to the Python values that a function sees, and back, a column at a time.

Spark keeps a state as a JVM row: ``StructType.toInternal`` converts the argument of ``update`` to plain values, and
``StructType.fromInternal`` builds the row that ``get`` returns. A timestamp is thus a naive datetime in the worker's
local time, and a struct inside a state is a `Row`. This module does the same with one difference: a value that does not
fit its column raises an error, whereas Spark silently stores null. This module also supports two cases that fail in
Spark: maps with arrays in their keys, and the first day of Python's calendar.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import logging
import math
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cache, partial
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T  # noqa: N812

from holdfast.backends.arrow.rows import one_chunk, storage_type
from holdfast.backends.base import Found
from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.spark_types import arrow_schema, require_utf8

_TWO_DAYS = dt.timedelta(days=2)
# In microseconds.
_HOUR = 3_600_000_000
_DAY = 24 * _HOUR
# First and last microsecond of Python's calendar, counted from 1970; and numpy's NaT.
_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
_NAT = -(1 << 63)

#: Builds a row from the values of its columns.
RowMaker = Callable[[Iterable[Any]], T.Row]
_AS_SPARKS = {"__module__": T.Row.__module__, "__doc__": T.Row.__doc__}
_set_class = object.__dict__["__class__"].__set__
_log = logging.getLogger(__name__)
# The JVM's decimals have at most 38 digits and round half up.
_DECIMALS = Context(prec=38, rounding=ROUND_HALF_UP)
# Exceptions that Spark, Arrow and Python raise when they convert a value of the wrong type.
_MISFITS = (ArithmeticError, AttributeError, TypeError, ValueError, pa.ArrowException)
_NONE = type(None)


@cache
def row_maker(*names: str) -> RowMaker:
    """Return a function that builds rows with these columns faster than ``Row("a", "b")(*values)``.

    The rows behave like Spark's, except for ``type(row)``; their copies and pickles are Spark's rows.
    """
    return _maker(names, T.Row(*names))


@cache
def struct_maker(*names: str) -> RowMaker:
    """Return a function that builds rows like those of ``StructType.fromInternal``, whose ``__fields__`` is a list."""
    return _maker(names, list(names))


def _maker(names: tuple[str, ...], fields: Sequence[str]) -> RowMaker:
    at: Any = namedtuple("at", [f"column_{n}" for n in range(len(names))])  # type: ignore[misc]  # noqa: PYI024
    pairs = [*zip(names, map(partial(getattr, at), at._fields), strict=True)]
    # If two columns share a name, the name refers to the first.
    own = {name: column for name, column in reversed(pairs) if not name.startswith("__") and not hasattr(T.Row, name)}
    return partial(tuple.__new__, type("Row", (_ShownRow,), {**own, "__fields__": fields, **_AS_SPARKS}))


class _ShownRow(T.Row):
    """Base class of the rows that functions see; access to instance attributes turns a row into Spark's class."""

    __class__ = T.Row  # type: ignore[assignment]

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return _become_sparks(self).__dict__

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_become_sparks(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_become_sparks(self), name)


def _become_sparks(row: T.Row) -> T.Row:
    names = row.__fields__
    _set_class(row, T.Row)
    row.__fields__ = names
    return row


def to_python(column: pa.Array, data_type: T.DataType) -> list[Any]:
    """Convert a column to the values that ``fromInternal`` would return."""
    made: list[Any]
    if isinstance(data_type, T.StructType):
        parts = [to_python(c, f.dataType) for c, f in zip(column.flatten(), data_type, strict=True)]
        rows: Iterable[Any] = zip(*parts, strict=True) if parts else itertools.repeat((), len(column))
        made = list(map(struct_maker(*data_type.names), rows))
    elif isinstance(data_type, T.ArrayType):
        made = _split_by_row(column, to_python(column.flatten(), data_type.elementType))
    elif isinstance(data_type, T.MapType):
        entries = column.cast(pa.large_list(pa.struct([column.type.key_field, column.type.item_field])))
        keys, items = entries.flatten().flatten()
        shown = to_python(keys, data_type.keyType)
        if isinstance(data_type.keyType, (T.ArrayType, T.BinaryType, T.StructType)):
            shown = list(map(_as_key, shown))
        pairs = zip(shown, to_python(items, data_type.valueType), strict=True)
        made = [dict(some) for some in _split_by_row(entries, list(pairs))]
    elif isinstance(data_type, T.BinaryType):
        return spark_versions.state_binaries(plain(column))
    elif isinstance(data_type, T.TimestampType):
        return _local_times(column.view(pa.int64()), data_type)
    else:
        return plain(column)
    if column.null_count:
        return [value if valid else None for value, valid in zip(made, plain(column.is_valid()), strict=True)]
    return made


def plain(column: pa.Array) -> list[Any]:
    """Return the same as ``column.to_pylist()``, faster."""
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
    """Convert numbers to dates, times or intervals; return an empty list if any is outside Python's range."""
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


def _split_by_row(column: pa.Array, flat: list[Any]) -> list[list[Any]]:
    """Split the flat elements of a list column by row; a null row gets an empty list."""
    ends = itertools.accumulate(pc.list_value_length(column).fill_null(0).to_pylist())
    return [flat[start:end] for start, end in itertools.pairwise(itertools.chain((0,), ends))]


def _as_key(value: Any) -> Any:
    """Make a value hashable for use as a dict key: lists become tuples, bytearrays become bytes."""
    if isinstance(value, T.Row):
        return struct_maker(*value.__fields__)(map(_as_key, value))
    if isinstance(value, list):
        return tuple(map(_as_key, value))
    return bytes(value) if isinstance(value, bytearray) else value


def _local_times(column: pa.Array, data_type: T.TimestampType) -> list[Any]:
    """Convert timestamps to naive datetimes in this process's time zone, as Spark does.

    An offset that is equal at both ends of an hour is taken to hold throughout the hour.
    """
    numbers = column.drop_null().to_numpy()
    hours, of_hour = np.unique(numbers // _HOUR, return_inverse=True)
    are_few = 4 * len(hours) < len(numbers)
    shifts = [_shift_of_hour(hour * _HOUR, data_type) for hour in hours.tolist()] if are_few else [None]
    if None in shifts:
        return [_local_time(micros, data_type) for micros in plain(column)]
    times = iter((numbers + np.array(shifts, np.int64)[of_hour]).view("M8[us]").tolist())
    return [next(times) if valid else None for valid in plain(column.is_valid())] if column.null_count else list(times)


def _shift_of_hour(start: int, data_type: T.TimestampType) -> int | None:
    """Return the UTC offset during an hour; None if the clocks change in the hour or repeat it."""
    try:
        first, last = (data_type.fromInternal(at) for at in (start, start + _HOUR - 1))
    except (OverflowError, ValueError, OSError):  # at the end of Python's calendar
        return None
    begins, ends = (int(np.datetime64(at, "us").astype(np.int64)) for at in (first, last))
    return None if first.fold or last.fold or ends - begins != _HOUR - 1 else begins - start


def _local_time(micros: Any, data_type: T.TimestampType) -> Any:
    """Convert like ``fromInternal``, but support the first day of Python's calendar; None for None."""
    try:
        return data_type.fromInternal(micros)
    except ValueError:
        # Python checks the previous day for a clock change, and the first day has no previous day. The offset two days
        # later is the same.
        return data_type.fromInternal(micros + 2 * _DAY) - _TWO_DAYS


class StateValueError(SchemaMismatchError):
    """A state passed to ``update`` does not fit its schema; the caller adds a note with the key of row `row`."""

    def __init__(self, message: str, /, row: int = -1, **facts: object) -> None:
        super().__init__(message, **facts)
        self.row = row


class RowValues:
    """Converts rows with a Spark schema. Raises `InvalidArgumentError` if a column's type cannot be stored."""

    def __init__(self, schema: T.StructType, what: str = "stateStructType") -> None:
        self._fields = schema.fields
        self._what = what
        # Storage types: the values of many keys together may exceed 2 GiB.
        self.arrow = pa.schema([f.with_type(storage_type(f.type)) for f in arrow_schema(schema, what)])

    def to_tuples(self, batch: pa.RecordBatch | pa.Table) -> list[tuple[Any, ...]]:
        """Convert rows to the tuples that `GroupState.get` returns; raises the errors of `to_columns`."""
        return list(zip(*self.to_columns(batch), strict=True))

    def of_found(self, found: Found) -> list[tuple[Any, ...] | None]:
        """Convert found rows to tuples; None for a key without state."""
        rows = self.to_tuples(found.values)
        if found.exists.all():
            return list(rows)
        return [row if exists else None for row, exists in zip(rows, found.exists.tolist(), strict=True)]

    def to_columns(self, batch: pa.RecordBatch | pa.Table) -> list[list[Any]]:
        """Convert columns, of storage types or Spark's, to the values that `GroupState.get` returns.

        Raises `InvalidArgumentError` for text that is not UTF-8, which a vectorised operator may have stored.
        """
        try:
            return [to_python(one_chunk(c), f.dataType) for c, f in zip(batch.columns, self._fields, strict=True)]
        except UnicodeDecodeError:
            require_utf8(batch, "the state")
            raise

    def to_arrow(self, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        """Convert rows passed to `GroupState.update` to columns of storage types. Raises `StateValueError`."""
        width = len(self._fields)
        wrong = next(itertools.compress(itertools.count(), map(width.__ne__, map(len, rows))), None)
        if wrong is not None:
            raise StateValueError(
                f"the state passed to update must have one value for each column of {self._what}",
                values=len(rows[wrong]),
                columns=width,
                row=wrong,
            )
        columns = list(zip(*rows, strict=True)) if rows else [()] * width
        arrays = [
            _to_arrow(c, f, t.type, self._what) for c, f, t in zip(columns, self._fields, self.arrow, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)


def _to_arrow(values: Sequence[Any], field: T.StructField, arrow_type: pa.DataType, what: str) -> pa.Array:
    try:
        array = _build(values, field.dataType, arrow_type)
    except _MISFITS:
        raise _misfit(values, field, arrow_type, what) from None
    if array.null_count and not field.nullable:
        raise StateValueError(
            f"the state passed to update is null in column {field.name!r}, which {what} declares NOT NULL",
            row=int(np.argmax(array.is_null().to_numpy(zero_copy_only=False))),
        )
    return array


def _build(values: Sequence[Any], data_type: T.DataType, arrow_type: pa.DataType) -> pa.Array:
    """Build a column from the values that `update` accepts."""
    usual, convert = _CONVERTERS[type(data_type)]
    if not usual.issuperset(map(type, values)):
        values = [_converted(value, usual, convert) for value in values]
    if isinstance(data_type, T.StructType):
        rows = [_fields_of(value, data_type) for value in values]
        if not len(data_type):  # Arrow would lose the number of rows
            return pa.array([None if value is None else {} for value in values], arrow_type)
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(data_type)
        parts = [_build(c, f.dataType, t.type) for c, f, t in zip(columns, data_type, arrow_type, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=list(arrow_type), mask=_mask(values))
    if isinstance(data_type, T.ArrayType):
        flat = list(itertools.chain.from_iterable(value for value in values if value is not None))
        elements = _build(flat, data_type.elementType, arrow_type.value_type)
        offsets = _offsets(values, pa.int64())
        return pa.LargeListArray.from_arrays(offsets, elements, type=arrow_type, mask=_mask(values))
    if isinstance(data_type, T.MapType):
        pairs = list(itertools.chain.from_iterable(value.items() for value in values if value is not None))
        keys = _build([key for key, _ in pairs], data_type.keyType, arrow_type.key_type)
        items = _build([item for _, item in pairs], data_type.valueType, arrow_type.item_type)
        return pa.MapArray.from_arrays(_offsets(values, pa.int32()), keys, items, type=arrow_type, mask=_mask(values))
    if isinstance(data_type, T.TimestampType):
        if time.daylight:
            _warn_if_ambiguous(values)
        return pa.array([data_type.toInternal(value) for value in values], pa.int64()).view(arrow_type)
    if isinstance(data_type, T.DecimalType):
        values = [None if value is None else _rounded(value, data_type.scale) for value in values]
    return pa.array(values, arrow_type, from_pandas=False)


def _warn_if_ambiguous(values: Iterable[dt.datetime | None]) -> None:
    """Warn of an ambiguous local time, for which Spark silently picks one of two instants."""
    for value in values:
        # At either end of Python's calendar, timestamp() may fail.
        if value is not None and value.tzinfo is None and dt.MINYEAR < value.year < dt.MAXYEAR:
            # In an hour that the clocks skip, the order is reversed.
            earlier, later = value.replace(fold=0).timestamp(), value.replace(fold=1).timestamp()
            if earlier < later:
                _warn_of_repeated_hour(time.tzname, value.date())
                return


@functools.cache
def _warn_of_repeated_hour(zones: tuple[str, str], day: dt.date) -> None:
    _log.warning(
        "on %s the clocks in %s repeat an hour, and a time in it is ambiguous: pass times with a time zone to "
        "update(), such as datetime.now(UTC), or run the executors in UTC (spark.executorEnv.TZ=UTC)",
        day,
        "/".join(zones),
    )


def _converted(value: Any, usual: frozenset[type], convert: Callable[[Any], Any]) -> Any:
    """Convert a value to a class for which Arrow's conversion matches Spark's."""
    if isinstance(value, np.generic):
        value = value.tolist()
    if type(value) in usual:
        return value
    return None if value is pd.NA else convert(value)


def _fields_of(value: Any, struct: T.StructType) -> Sequence[Any]:
    """Return the field values of a struct given in any form that Spark accepts."""
    if value is None:
        return (None,) * len(struct)
    if isinstance(value, dict):
        unknown = value.keys() - set(struct.names)
        if unknown:
            raise ValueError(f"a struct with fields {struct.names} got unknown fields {sorted(map(str, unknown))}")
        return [value.get(name) for name in struct.names]
    if not isinstance(value, (tuple, list)):
        return [vars(value).get(name) for name in struct.names]
    if len(value) != len(struct):
        raise ValueError(f"a struct with {len(struct)} fields got {len(value)} values")
    return value


def _offsets(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    lengths = (0 if value is None else len(value) for value in values)
    return pa.array(itertools.accumulate(lengths, initial=0), arrow_type)


def _mask(values: Sequence[Any]) -> pa.Array | None:
    nulls = [value is None for value in values]
    return pa.array(nulls, pa.bool_()) if any(nulls) else None


def _misfit(values: Sequence[Any], field: T.StructField, arrow_type: pa.DataType, what: str) -> StateValueError:
    """Return an error about the first value that does not fit."""
    for row, value in enumerate(values):
        try:
            _build([value], field.dataType, arrow_type)
        except _MISFITS as exc:
            return StateValueError(
                f"a value passed to update does not fit column {field.name!r} of {what}: {exc}",
                type=field.dataType.simpleString(),
                given=type(value).__name__,
                row=row,
            )
    raise AssertionError("each value fits, but all together do not")


def _text(value: Any) -> str:
    """Convert a value to text; booleans and numbers get the JVM's format."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _text_of_double(value)
    if not isinstance(value, (str, int, Decimal)):
        raise TypeError("convert it to str")
    return str(value)


def _text_of_double(value: float) -> str:
    """Format like ``Double.toString``, which uses an exponent for 10**7 or more and below 10**-3."""
    if not math.isfinite(value):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return np.format_float_positional(value, trim="0")
    mantissa, exponent = np.format_float_scientific(value, trim="0").split("e")
    return f"{mantissa}E{int(exponent)}"


def _whole(value: Any) -> int | None:
    """Convert to an integer, NaN to null; reject a float with a fraction, which Arrow would truncate."""
    if _is_nan(value):
        return None
    whole = int(value)
    if not isinstance(value, (int, float)) or whole != value:
        raise TypeError("it is not a whole number")
    return whole


def _real(value: Any) -> float:
    if not isinstance(value, (int, float)) and not _is_nan(value):
        raise TypeError("convert it to float")
    return float(value)


def _decimal(value: Any) -> Decimal | None:
    if _is_nan(value):
        return None
    if type(value) is not int and not isinstance(value, Decimal):
        raise TypeError("convert it to decimal.Decimal")
    return Decimal(value)


def _rounded(value: Decimal, scale: int) -> Decimal | None:
    return None if value.is_nan() else value.quantize(Decimal(1).scaleb(-scale), context=_DECIMALS)


def _is_nan(value: Any) -> bool:
    return isinstance(value, (float, Decimal)) and math.isnan(value)


def _date(value: Any) -> dt.date:
    _refuse_nat(value)
    return dt.date.fromordinal(value.toordinal())


def _interval(value: Any) -> dt.timedelta | None:
    if value is pd.NaT:
        return None
    if not isinstance(value, dt.timedelta):
        raise TypeError("convert it to datetime.timedelta")
    return value


def _refuse_nat(value: Any) -> None:
    if value is pd.NaT:
        raise TypeError("use None instead of NaT")


def _moment(value: Any) -> dt.datetime:
    _refuse_nat(value)
    if not isinstance(value, dt.datetime):
        raise TypeError("convert it to datetime.datetime")
    return value


def _wall_clock(value: Any) -> dt.datetime:
    """Drop the time zone, as Spark does."""
    _refuse_nat(value)
    return cast("dt.datetime", value.replace(tzinfo=None))


def _sequence(value: Any) -> list[Any] | None:
    """Convert a value to a list, with bytes signed as in the JVM; reject text and mappings."""
    if _is_nan(value):
        return None
    if isinstance(value, (bytes, bytearray)):
        return np.frombuffer(value, np.int8).tolist()
    if isinstance(value, np.ndarray):
        return cast("list[Any]", value.tolist())
    if isinstance(value, (str, memoryview, Mapping)):
        raise TypeError("convert it to a list")
    return list(value)


def _mapping(value: Any) -> dict[Any, Any] | None:
    return None if _is_nan(value) else dict(value.items())


def _other(value: Any) -> Any:
    """Convert NaN to None; leave other values to Arrow's or Spark's conversion."""
    return None if _is_nan(value) else value


# By type: the classes that Arrow converts as Spark does, and a function that converts other values to these classes.
_CONVERTERS: dict[type[T.DataType], tuple[frozenset[type], Callable[[Any], Any]]] = {
    T.ArrayType: (frozenset({list, tuple, _NONE}), _sequence),
    T.BinaryType: (frozenset({bytes, bytearray, _NONE}), _other),
    T.BooleanType: (frozenset({bool, _NONE}), _other),
    T.ByteType: (frozenset({int, _NONE}), _whole),
    T.DateType: (frozenset({dt.date, _NONE}), _date),
    T.DayTimeIntervalType: (frozenset({dt.timedelta, _NONE}), _interval),
    T.DecimalType: (frozenset({Decimal, _NONE}), _decimal),
    T.DoubleType: (frozenset({float, int, _NONE}), _real),
    T.FloatType: (frozenset({float, int, _NONE}), _real),
    T.IntegerType: (frozenset({int, _NONE}), _whole),
    T.LongType: (frozenset({int, _NONE}), _whole),
    T.MapType: (frozenset({dict, _NONE}), _mapping),
    T.NullType: (frozenset({_NONE}), _other),
    T.ShortType: (frozenset({int, _NONE}), _whole),
    T.StringType: (frozenset({str, _NONE}), _text),
    T.StructType: (frozenset({T.Row, dict, list, tuple, _NONE}), lambda value: value),
    T.TimestampNTZType: (frozenset({_NONE}), _wall_clock),
    T.TimestampType: (frozenset({dt.datetime, _NONE}), _moment),
}
