"""Every type of an output column, and every kind of column that a function may return for it."""

from __future__ import annotations

import collections
import datetime as dt
import uuid
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    Row,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

_POINT = StructType().add("a", LongType()).add("b", StringType())

TYPES: dict[str, DataType] = {
    data_type.simpleString(): data_type
    for data_type in (
        ByteType(),
        ShortType(),
        IntegerType(),
        LongType(),
        FloatType(),
        DoubleType(),
        DecimalType(5, 0),
        DecimalType(10, 2),
        DecimalType(38, 18),
        StringType(),
        BinaryType(),
        BooleanType(),
        DateType(),
        TimestampType(),
        TimestampNTZType(),
        DayTimeIntervalType(),
        NullType(),
        ArrayType(LongType()),
        ArrayType(DoubleType()),
        ArrayType(DecimalType(10, 2)),
        ArrayType(StringType()),
        ArrayType(BinaryType()),
        ArrayType(DateType()),
        ArrayType(TimestampType()),
        ArrayType(ArrayType(LongType())),
        ArrayType(_POINT),
        MapType(StringType(), LongType()),
        MapType(LongType(), TimestampType()),
        MapType(StringType(), ArrayType(DoubleType())),
        MapType(DateType(), DoubleType()),
        _POINT,
        StructType().add("t", TimestampType()).add("n", TimestampNTZType()).add("d", DateType()),
        StructType().add("a", ArrayType(StructType().add("x", DoubleType()))),
    )
}

_NOON = dt.datetime(2024, 1, 1, 12)  # noqa: DTZ001
_AWARE = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
_TOKYO = dt.datetime(2024, 7, 1, 12, 0, 0, 123456, tzinfo=ZoneInfo("Asia/Tokyo"))
_DATE = dt.date(2024, 1, 1)

_OBJECTS: list[Any] = [
    *(None, float("nan"), pd.NaT, pd.NA),
    *(True, 0, 1, -1, 300, 2**40, 2**53 + 1, 2**62, 2**70, 1.0, 1.5, 1e300, float("inf")),
    *(
        Decimal(1),
        Decimal("1.25"),
        Decimal("1.255"),
        Decimal("1E20"),
        Decimal("NaN"),
        Decimal("12345678901234567890.5"),
    ),
    *("text", "5", "1.5", "2024-01-01", "true", "", b"ab", b"\xff", bytearray(b"ab"), memoryview(b"ab")),
    *(_DATE, dt.date.min, dt.date.max, dt.time(12), dt.timedelta(days=1, microseconds=1), dt.timedelta(days=200_000)),
    *(_NOON, _AWARE, _TOKYO, dt.datetime(1500, 1, 1), dt.datetime.max),  # noqa: DTZ001, DTZ901
    *(pd.Timestamp(_NOON), pd.Timestamp("2024-01-01 00:00:00.123456789"), pd.Timestamp(_AWARE), pd.Timestamp(_TOKYO)),
    *(pd.Timedelta("1 days 00:00:00.000000001"), pd.Timedelta("1 days 00:00:00.000001")),
    *([1, 2], [], [1, None], ["a", "b"], [1.5, float("nan")], [1, "a"], [[1], [2, 3]], [None, [1]], [_NOON, _AWARE]),
    *([_DATE], [Decimal("1.5"), None], [b"a", bytearray(b"b")], [{"a": 1, "b": "x"}, None], [Row(a=1, b="x")]),
    *((1, "a"), (1, 2), (1, 2, 3), {1}, range(3), collections.deque([1, 2]), [("a", 1)]),
    *({"a": 1, "b": "x"}, {"a": 1}, {"c": 1}, {_DATE: 1.5}, {1: _NOON}, {"a": [1.0, None]}, {}),
    *({"a": [{"x": 1.5}, {"x": None}, None]}, {"t": _AWARE, "n": _NOON, "d": _DATE}, Row(a=1, b="x"), Row(1, "x")),
    *(np.array([1, 2]), np.array([1.5, np.nan]), np.array(5), np.array(["a", "b"])),
    *(np.int8(5), np.int64(5), np.uint64(2**63), np.float32(1.5), np.float64(1.5), np.bool_(True)),
    *(
        np.str_("a"),
        np.bytes_(b"a"),
        np.datetime64("2024-01-01T12"),
        np.datetime64("2024-01-01"),
        np.timedelta64(5, "s"),
    ),
    *(object(), uuid.UUID(int=5), pd.Interval(0, 1), pd.Period("2024-01")),
]

_TYPED: list[tuple[str, list[Any]]] = [
    *(("int8", [5]), ("int16", [300]), ("int32", [5]), ("int64", [5]), ("int64", [2**53 + 1]), ("int64", [2 * 10**9])),
    *(("uint8", [200]), ("uint64", [2**63]), ("uint64", [5]), ("bool", [True]), ("boolean", [True, None])),
    *(("float16", [1.5]), ("float32", [1.5]), ("float64", [1.0]), ("float64", [1.5]), ("float64", [np.nan])),
    *(("float64", [1.0, np.nan]), ("float64", [1.5, np.nan]), ("float64", [np.inf]), ("float64", [1e300])),
    *(("Int8", [5]), ("Int64", [5, None]), ("Int64", [2**53 + 1, None]), ("Float64", [1.5, None])),
    *(("string", ["a", None]), ("string", ["5"]), ("category", ["a", None]), ("category", [1, 2, 1])),
    *(
        ("category", [pd.Timestamp(_NOON)]),
        ("Sparse[float]", [1.0, np.nan]),
        ("period[M]", ["2024-01"]),
        ("S1", [b"a"]),
    ),
    *(("M8[ns]", ["2024-01-01 12:00:00.123456789"]), ("M8[us]", ["2024-01-01 12:00"]), ("M8[s]", ["1500-01-01 12:00"])),
    *(("M8[ns]", ["2024-01-01"]), ("M8[ns]", [None]), ("M8[ns]", ["2024-01-01", None])),
    # In a gap and in a fold of the session's zone.
    *(("M8[ns]", ["2024-03-10 02:30"]), ("M8[ns]", ["2024-11-03 01:30"])),
    *(("datetime64[ns, UTC]", ["2024-01-01 12:00"]), ("datetime64[us, Asia/Tokyo]", ["2024-01-01 12:00", None])),
    *(("m8[ns]", [1500]), ("m8[us]", [1500]), ("m8[s]", [1]), ("m8[ns]", [None])),
    *(("object", [None, 1]), ("object", [float("nan"), 1]), ("object", [pd.NA, 1]), ("object", [True, 1])),
    *(("object", [1, 1.5]), ("object", [1.5, 1]), ("object", [1, "a"]), ("object", [pd.Timestamp(_NOON), None])),
    *(("object", [_NOON, _AWARE]), ("object", [{"a": 1, "b": "x"}, None]), ("object", [{"a": 1}, float("nan")])),
    *(
        ("object", [[1], float("nan")]),
        ("object", [_DATE, pd.Timestamp(_NOON)]),
        ("object", [pd.Timestamp(_NOON), _DATE]),
    ),
]

# Spark fails with these for every type: its worker makes them of several pieces, which Arrow does not take.
_OF_ARROW: list[tuple[Any, list[Any]]] = [
    *((pa.int64(), [5, None]), (pa.float64(), [1.5, None]), (pa.string(), ["a", None]), (pa.bool_(), [True, None])),
    *((pa.timestamp("us"), [_NOON, None]), (pa.timestamp("us", "UTC"), [_AWARE, None]), (pa.date32(), [_DATE, None])),
    *(
        (pa.decimal128(10, 2), [Decimal("1.50"), None]),
        (pa.binary(), [b"a", None]),
    ),
    (pa.duration("us"), [dt.timedelta(1), None]),
]


def _object(value: Any) -> pd.Series[Any]:
    values = np.empty(1, object)
    values[0] = value
    return pd.Series(values, dtype=object)


COLUMNS: dict[str, pd.Series[Any]] = {
    **{f"{type(value).__name__} {value!r}": _object(value) for value in _OBJECTS},
    **{f"{dtype} {values}": pd.Series(values, dtype=dtype) for dtype, values in _TYPED},
    "list of pyarrow": pd.Series([[1, 2]], dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
}
OF_ARROW: dict[str, pd.Series[Any]] = {
    **{f"{dtype} {values}": pd.Series(values, dtype=pd.ArrowDtype(dtype)) for dtype, values in _OF_ARROW},
    "string[pyarrow]": pd.Series(["a", None], dtype="string[pyarrow]"),
}
