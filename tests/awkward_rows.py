"""Rows of the types and values that a pandas frame would alter."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T  # noqa: N812

from holdfast.spark_integration.spark_types import arrow_schema

FOLD = dt.datetime(2024, 11, 3, 5, 30, tzinfo=dt.UTC)  # 01:30 in New York, and an hour later again
#: By type: values that a pandas frame would alter, and a null.
AWKWARD: dict[T.DataType, list[Any]] = {
    T.BooleanType(): [True, False, None, True],
    T.ByteType(): [-128, 127, None, 0],
    T.ShortType(): [-(2**15), 2**15 - 1, None, 0],
    T.IntegerType(): [-(2**31), 2**31 - 1, None, 0],
    T.LongType(): [2**53 + 1, -(2**63), None, 2**63 - 1],
    T.FloatType(): [math.nan, -0.0, None, math.inf],
    T.DoubleType(): [math.nan, -0.0, None, 5e-324],
    T.DecimalType(38, 18): [Decimal("12345678901234567890.123456789012345678"), Decimal("-1E-18"), None, Decimal(0)],
    T.StringType(): ["", "ünï\0code", None, "None"],
    T.BinaryType(): [b"", b"\xff\x00", None, b"x"],
    T.DateType(): [dt.date(1, 1, 1), dt.date(9999, 12, 31), None, dt.date(1969, 12, 31)],
    T.TimestampType(): [FOLD, FOLD + dt.timedelta(hours=1), None, dt.datetime(9999, 1, 1, tzinfo=dt.UTC)],
}
SCHEMA = T.StructType([T.StructField(f"v {i}`", t) for i, t in enumerate(AWKWARD)])
ARROW = arrow_schema(SCHEMA, "the input")
INPUT = pa.table([pa.array(v, t) for v, t in zip(AWKWARD.values(), ARROW.types, strict=True)], schema=ARROW)


def exact(table: pa.Table) -> list[tuple[Any, ...]]:
    """Return rows in which -0.0, 0.0, NaN and null differ, and instants are numbers."""
    columns = []
    for column in table.columns:
        plain = column.cast(pa.timestamp("us")).cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        columns.append([repr(v) for v in plain.to_pylist()])
    return sorted(zip(*columns, strict=True))
