"""Arrow columns to the Python values that `GroupState` gives and takes, and back, a column at a time.

Spark keeps a state as a row of the JVM: ``StructType.toInternal`` turns what the function gave to ``update`` into
plain values, and ``StructType.fromInternal`` makes the row that ``get`` returns. So a timestamp is a datetime without
zone in the local time of the worker's process, and a struct inside a state is a `Row`. The same is done here; but a
value that does not fit its column, of which Spark makes a null without a word, is an error.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    IntegerType,
    LongType,
    MapType,
    Row,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from holdfast.backends.arrow_rows import one_chunk
from holdfast.errors import SchemaMismatchError
from holdfast.spark_integration.columns import arrow_schema

# The JVM's decimals have at most 38 digits, and round half up.
_DECIMALS = Context(prec=38, rounding=ROUND_HALF_UP)
# What Spark's conversions, Arrow's and Python's own raise for a value of a wrong type.
_MISFITS = (ArithmeticError, AttributeError, TypeError, ValueError, pa.ArrowException)


class StateValueError(SchemaMismatchError):
    """A state that a function gave to ``update`` does not fit the state's schema.

    Attributes
    ----------
    row : int
        Which of the rows it is; the caller knows whose, and says so.
    """

    def __init__(self, message: str, /, row: int = -1, **facts: object) -> None:
        super().__init__(message, **facts)
        self.row = row


class RowValues:
    """Converts the rows of one Spark schema.

    Parameters
    ----------
    schema : StructType

    Raises
    ------
    InvalidArgumentError
        A column's type cannot be kept.
    """

    def __init__(self, schema: StructType) -> None:
        self._fields = schema.fields
        self.arrow = arrow_schema(schema, "stateStructType")

    def to_tuples(self, batch: pa.RecordBatch | pa.Table) -> list[tuple[Any, ...]]:
        """Return rows as `GroupState.get` gives them.

        Parameters
        ----------
        batch : pyarrow.RecordBatch or pyarrow.Table
            The columns of the schema in its order, in these types or those in which they are stored.
        """
        columns = [_to_python(one_chunk(c), f.dataType) for c, f in zip(batch.columns, self._fields, strict=True)]
        return list(zip(*columns, strict=True))

    def to_arrow(self, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        """Return rows that were given to `GroupState.update` as columns.

        Raises
        ------
        StateValueError
            A row has too many or too few values, or one that does not fit its column.
        """
        width = len(self._fields)
        for at, row in enumerate(rows):
            if len(row) != width:
                raise StateValueError(
                    "the state given to update must have one value for each column of stateStructType",
                    values=len(row),
                    columns=width,
                    row=at,
                )
        columns = list(zip(*rows, strict=True)) if rows else [()] * width
        arrays = [_to_arrow(c, f, t.type) for c, f, t in zip(columns, self._fields, self.arrow, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)


def _to_python(column: pa.Array, data_type: DataType) -> list[Any]:
    """Return the values as ``fromInternal`` gives them."""
    made: list[Any]
    if isinstance(data_type, StructType):
        make = Row(*data_type.names)
        parts = [_to_python(c, f.dataType) for c, f in zip(column.flatten(), data_type, strict=True)]
        made = [make(*values) for values in zip(*parts, strict=True)]
    elif isinstance(data_type, ArrayType):
        made = _stretches(column, _to_python(column.flatten(), data_type.elementType))
    elif isinstance(data_type, MapType):
        entries = column.cast(pa.large_list(pa.struct([column.type.key_field, column.type.item_field])))
        keys, items = entries.flatten().flatten()
        pairs = zip(_to_python(keys, data_type.keyType), _to_python(items, data_type.valueType), strict=True)
        made = [dict(some) for some in _stretches(entries, list(pairs))]
    elif isinstance(data_type, TimestampType):
        # Spark's own conversion: only the process knows its local time, summer time included.
        return [data_type.fromInternal(micros) for micros in _plain(column.view(pa.int64()))]
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
    """Return the elements of each row of a list column, given all of them; empty where the row is null."""
    ends = itertools.accumulate(pc.list_value_length(column).fill_null(0).to_pylist())
    return [flat[start:end] for start, end in itertools.pairwise(itertools.chain((0,), ends))]


def _to_arrow(values: Sequence[Any], field: StructField, arrow_type: pa.DataType) -> pa.Array:
    try:
        array = _build(values, field.dataType, arrow_type)
    except _MISFITS:
        raise _misfit(values, field, arrow_type) from None
    if array.null_count and not field.nullable:
        raise StateValueError(
            f"the state given to update has no value in column {field.name!r}, which stateStructType declares NOT NULL",
            row=int(np.argmax(array.is_null().to_numpy(zero_copy_only=False))),
        )
    return array


def _build(values: Sequence[Any], data_type: DataType, arrow_type: pa.DataType) -> pa.Array:
    """Return a column of what `update` accepts."""
    if isinstance(data_type, StructType):
        rows = [_fields_of(value, data_type) for value in values]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(data_type)
        parts = [_build(c, f.dataType, t.type) for c, f, t in zip(columns, data_type, arrow_type, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=list(arrow_type), mask=_mask(values))
    if isinstance(data_type, ArrayType):
        flat = list(itertools.chain.from_iterable(value for value in values if value is not None))
        elements = _build(flat, data_type.elementType, arrow_type.value_type)
        return pa.ListArray.from_arrays(_offsets(values), elements, type=arrow_type, mask=_mask(values))
    if isinstance(data_type, MapType):
        pairs = list(itertools.chain.from_iterable(value.items() for value in values if value is not None))
        keys = _build([key for key, _ in pairs], data_type.keyType, arrow_type.key_type)
        items = _build([item for _, item in pairs], data_type.valueType, arrow_type.item_type)
        return pa.MapArray.from_arrays(_offsets(values), keys, items, type=arrow_type, mask=_mask(values))
    usual, convert = _CONVERTERS.get(type(data_type), (None, None))
    if convert is not None and not set(map(type, values)) <= {usual, type(None)}:
        values = [None if value is None else convert(value) for value in values]
    if isinstance(data_type, TimestampType):
        return pa.array([data_type.toInternal(value) for value in values], pa.int64()).view(arrow_type)
    if isinstance(data_type, DecimalType):
        values = [None if value is None else _decimal(value, data_type.scale) for value in values]
    return pa.array(values, arrow_type, from_pandas=False)


def _fields_of(value: Any, struct: StructType) -> Sequence[Any]:
    """Return the values of a struct's fields, given in any way that Spark takes."""
    if value is None:
        return (None,) * len(struct)
    if not isinstance(value, (tuple, list)):
        by_name = value if isinstance(value, dict) else vars(value)
        return [by_name.get(name) for name in struct.names]
    if len(value) != len(struct):
        raise ValueError(f"a struct of {len(struct)} fields was given {len(value)} values")
    return value


def _offsets(values: Sequence[Any]) -> pa.Array:
    lengths = (0 if value is None else len(value) for value in values)
    return pa.array(itertools.accumulate(lengths, initial=0), pa.int32())


def _mask(values: Sequence[Any]) -> pa.Array | None:
    nulls = [value is None for value in values]
    return pa.array(nulls, pa.bool_()) if any(nulls) else None


def _misfit(values: Sequence[Any], field: StructField, arrow_type: pa.DataType) -> StateValueError:
    """Say which is the first value that does not fit, and why."""
    for row, value in enumerate(values):
        try:
            _build([value], field.dataType, arrow_type)
        except _MISFITS as exc:
            return StateValueError(
                f"a value given to update does not fit column {field.name!r} of stateStructType: {exc}",
                type=field.dataType.simpleString(),
                given=type(value).__name__,
                row=row,
            )
    raise AssertionError("the values fit one by one, and not together")


def _text(value: Any) -> str:
    """Return text; of truth values and whole numbers what the JVM writes for them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, (str, int)):
        raise TypeError("convert it to str")
    return str(value)


def _whole(value: Any) -> int:
    """Return an integer; a float is one if it has no fraction. Arrow would cut the fraction off."""
    whole = int(value)
    if not isinstance(value, (int, float)) or whole != value:
        raise TypeError("it is no whole number")
    return whole


def _date(value: Any) -> dt.date:
    return dt.date.fromordinal(value.toordinal())


def _interval(value: Any) -> dt.timedelta:
    if not isinstance(value, dt.timedelta):
        raise TypeError("convert it to datetime.timedelta")
    return value


def _wall_clock(value: Any) -> dt.datetime:
    """Return a time without its zone, as Spark does."""
    return value.replace(tzinfo=None)


def _decimal(value: Any, scale: int) -> Decimal:
    exact = Decimal(value) if type(value) is int else value
    return exact.quantize(Decimal(1).scaleb(-scale), context=_DECIMALS)


# By type: the class of most values, of which Arrow makes what Spark does, and what converts others.
_CONVERTERS: dict[type[DataType], tuple[type, Callable[[Any], Any]]] = {
    ByteType: (int, _whole),
    ShortType: (int, _whole),
    IntegerType: (int, _whole),
    LongType: (int, _whole),
    StringType: (str, _text),
    DateType: (dt.date, _date),
    DayTimeIntervalType: (dt.timedelta, _interval),
    TimestampNTZType: (type(None), _wall_clock),
}
