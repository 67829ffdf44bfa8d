"""The rows that a processor writes and reads: tuples of Python values, checked and copied when written.

Written rows are converted later, for many keys at once. So a value that does not fit its column fails at the end of the
slab, with a note of its key, or earlier if the processor reads it.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import types as T  # noqa: N812

from holdfast.backends.arrow.values import first_that_fails, forbidden_null
from holdfast.spark_integration.keyed.pandas_with_state import copier
from holdfast.spark_integration.keyed.python_values import RowValues, StateValueError
from holdfast.spark_integration.processor.state.slab import state_error

State = tuple[Any, ...]

# By type, the class whose values come back from the store unchanged.
_EXACT: dict[type[T.DataType], type] = {T.BooleanType: bool, T.DoubleType: float, T.LongType: int, T.StringType: str}
# The same for map keys, which are compared, so without floats: NaN is not equal to itself.
_EXACT_IN_KEYS: dict[type[T.DataType], type] = {
    T.BinaryType: bytes,
    T.BooleanType: bool,
    T.DateType: dt.date,
    T.LongType: int,
    T.StringType: str,
}


class StateRows:
    """Checks, copies and converts rows of one schema."""

    def __init__(self, schema: T.StructType, what: str) -> None:
        self.values = RowValues(schema, what)
        self._what = what
        self._names = schema.names
        self._width = len(schema.names)
        self._exact = tuple(_EXACT.get(type(field.dataType)) for field in schema)
        self._takes_nulls = all(field.nullable for field in schema)
        self._copied = copier(schema)

    def given(self, row: Any, doing: str = "updating value state") -> State:
        """Check a row and return it as a tuple; nested mutable values are copied, as they may change later."""
        if type(row) is not tuple:
            row = _values(row, self._names, self._what)
        if len(row) != self._width:
            raise state_error(
                doing,
                "STRUCT_ARRAY_LENGTH_MISMATCH",
                f"Input row doesn't have expected number of values required by the schema. {self._width} fields are "
                f"required while {len(row)} values are provided ({self._what}).",
            )
        return row if self._copied is None else tuple(map(self._copied, row))

    def each_given(self, rows: Any) -> list[State]:
        """Check several rows; see `given`."""
        if rows is None or isinstance(rows, (str, bytes, Mapping)):
            raise PySparkTypeError(f"{self._what} takes a list of tuples, not {type(rows).__name__}")
        return [self.given(row) for row in rows]

    def as_read(self, row: State) -> State:
        """Return a written row as the store will return it. Raises `StateValueError`."""
        if _is_unchanged(row, self._exact) and (self._takes_nulls or None not in row):
            return row
        return self.each_as_read([row])[0]

    def each_as_read(self, rows: Sequence[State]) -> list[State]:
        """Return written rows as the store will return them."""
        return self.values.to_tuples(self.values.to_arrow(rows)) if rows else []

    @contextmanager
    def placed(self, places: Sequence[int]) -> Iterator[None]:
        """Replace the row number i in an error by its key's index in the slab, ``places[i]``."""
        try:
            yield
        except StateValueError as exc:
            exc.row = places[exc.row]
            raise

    def copy(self, row: State) -> State:
        """Return a copy of a row that was read, so that the processor may change nested values."""
        return row if self._copied is None else tuple(map(self._copied, row))


def _values(row: Any, names: list[str], what: str) -> State:
    if isinstance(row, T.Row) and hasattr(row, "__fields__"):
        given = list(row.__fields__)
        if given != names and sorted(given) == sorted(names):
            raise PySparkTypeError(
                f"{what} takes values by position, and this Row has the columns in another order: use the order "
                f"{', '.join(names)}"
            )
    elif not isinstance(row, Iterable) or isinstance(row, (str, bytes, bytearray, Mapping, AbstractSet)):
        raise PySparkTypeError(
            f"{what} takes a tuple with a value for each of the columns {', '.join(names)}, not {type(row).__name__}"
        )
    return tuple(row)


def _is_unchanged(row: State, exact: tuple[type | None, ...]) -> bool:
    """Return whether these values come back from the store unchanged."""
    for value, class_ in zip(row, exact, strict=True):
        if type(value) is not class_:
            if value is not None:
                return False
        elif class_ is int and not -(1 << 63) <= value < 1 << 63:  # type: ignore[operator]
            return False
    return True


class UserKeys:
    """Converts map keys to a form that is equal in Python exactly if the keys are equal."""

    def __init__(self, schema: T.StructType, what: str) -> None:
        self.rows = StateRows(schema, what)
        self._what = what
        self._exact = tuple(_EXACT_IN_KEYS.get(type(field.dataType)) for field in schema)
        self._is_exact = None not in self._exact
        self._comparable = _of_fields(schema)

    def of(self, key: Any, doing: str) -> State:
        """Convert a key given by the processor. Raises `StateValueError` if a value does not fit its column."""
        given = self.rows.given(key, doing)
        if _is_unchanged(given, self._exact):
            return given
        return self._comparable(self.rows.each_as_read([given])[0])

    def to_arrow(self, keys: Sequence[State]) -> pa.RecordBatch:
        """Return keys as columns. Raises `StateValueError`, with the key's index as ``row``."""
        columns = self.rows.values.to_arrow(keys)
        for name, column in zip(columns.schema.names, columns.columns, strict=True):
            if forbidden := forbidden_null(column):
                raise StateValueError(
                    f"a key has a null inside column {name!r}, in {forbidden}, which {self._what} declares NOT NULL",
                    row=first_that_fails(column),
                )
        return columns

    def of_stored(self, keys: list[State]) -> list[State]:
        """Convert keys read from the store."""
        return keys if self._is_exact else [self._comparable(key) for key in keys]


def _of_fields(schema: T.StructType) -> Callable[[State], State]:
    """Return a function that makes the values of a struct comparable and hashable."""
    makers = [_maker(field.dataType) for field in schema]
    return lambda row: tuple(
        [value if make is None or value is None else make(value) for make, value in zip(makers, row, strict=True)]
    )


def _maker(data_type: T.DataType) -> Callable[[Any], Any] | None:
    """Return a function that makes a value comparable and hashable, or None if the value already is."""
    if isinstance(data_type, T.StructType):
        return _of_fields(data_type)
    if isinstance(data_type, T.ArrayType):
        make = _maker(data_type.elementType)
        return tuple if make is None else lambda some: tuple([None if one is None else make(one) for one in some])
    return _MAKERS.get(type(data_type))


def _in_utc(moment: dt.datetime) -> dt.datetime:
    """Convert a time from the process's zone to UTC, since two times look equal locally when clocks are set back."""
    try:
        return moment.astimezone(dt.UTC)
    except (OverflowError, ValueError):  # at either end of Python's calendar, where no clocks are set back
        return moment


def _one_nan(value: float) -> float:
    return math.nan if math.isnan(value) else value  # a single object, which lookups find by identity


_MAKERS: dict[type[T.DataType], Callable[[Any], Any]] = {
    T.BinaryType: bytes,
    T.DoubleType: _one_nan,
    T.FloatType: _one_nan,
    T.TimestampType: _in_utc,
}
