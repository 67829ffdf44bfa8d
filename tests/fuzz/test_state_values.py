"""States against what Spark was seen to keep of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.types import DayTimeIntervalType, Row, StructType

from holdfast.backends.run import TableSchema
from holdfast.spark_integration.keyed.pandas_with_state import KeyStates
from holdfast.spark_integration.keyed.python_values import RowValues
from holdfast.testing.ddl import parse_schema
from tests.time_zone import process_in

# ruff: noqa: DTZ001 - times of day without a zone are what is kept


NAN, INF = float("nan"), float("inf")

# Declared type, what is given to update, what get returns in the next micro-batch.
KEPT: list[tuple[str, Any, Any]] = [
    ("bigint", 2**63 - 1, 9223372036854775807),
    ("bigint", np.int8(5), 5),
    ("bigint", np.int64(5), 5),
    ("bigint", NAN, None),
    ("bigint", pd.NA, None),
    ("bigint", Decimal("NaN"), None),
    ("tinyint", NAN, None),
    ("float", 0.1, 0.10000000149011612),
    ("float", 1e300, INF),
    ("float", -1e300, -INF),
    ("float", 1e-50, 0.0),
    ("float", NAN, NAN),
    ("float", np.float32(0.1), 0.10000000149011612),
    ("float", Decimal("NaN"), NAN),
    ("double", NAN, NAN),
    ("double", np.float64(0.1), 0.1),
    ("double", Decimal("NaN"), NAN),
    ("decimal(5,1)", Decimal("0.15"), Decimal("0.2")),
    ("decimal(5,1)", Decimal("-0.15"), Decimal("-0.2")),
    ("decimal(5,1)", Decimal("0.25"), Decimal("0.3")),
    ("decimal(5,1)", Decimal("9999.94"), Decimal("9999.9")),
    ("decimal(5,1)", Decimal("1E3"), Decimal("1000.0")),
    ("decimal(5,1)", NAN, None),
    ("decimal(5,1)", Decimal("NaN"), None),
    (
        "decimal(38,18)",
        Decimal("12345678901234567890.123456789012345678"),
        Decimal("12345678901234567890.123456789012345678"),
    ),
    ("decimal(38,18)", Decimal("1E-19"), Decimal("0E-18")),
    ("string", 5, "5"),
    ("string", -5, "-5"),
    ("string", 2**70, "1180591620717411303424"),
    ("string", True, "true"),
    ("string", 1.0, "1.0"),
    ("string", 1.5, "1.5"),
    ("string", -0.0, "-0.0"),
    ("string", 100.0, "100.0"),
    ("string", 1234567.0, "1234567.0"),
    ("string", 12345678.0, "1.2345678E7"),
    ("string", 0.001, "0.001"),
    ("string", 0.0001, "1.0E-4"),
    ("string", 1e300, "1.0E300"),
    ("string", 1.7e-300, "1.7E-300"),
    ("string", NAN, "NaN"),
    ("string", INF, "Infinity"),
    ("string", -INF, "-Infinity"),
    ("string", np.float64(0.1), "0.1"),
    ("string", Decimal("1.50"), "1.50"),
    ("string", Decimal("1E+20"), "1E+20"),
    ("string", Decimal("1E-7"), "1E-7"),
    ("string", Decimal("1E-6"), "0.000001"),
    ("string", Decimal("NaN"), "NaN"),
    ("string", np.str_("a"), "a"),
    ("binary", bytearray(b"ab"), b"ab"),
    ("binary", "text", b"text"),
    ("boolean", np.bool_(True), True),
    ("boolean", NAN, None),
    ("date", dt.date.min, dt.date(1, 1, 1)),
    ("date", dt.date.max, dt.date(9999, 12, 31)),
    ("date", dt.datetime(2024, 1, 1, 23), dt.date(2024, 1, 1)),
    ("date", pd.Timestamp("2024-01-01 23:00"), dt.date(2024, 1, 1)),
    ("timestamp", dt.datetime(2024, 1, 1, 12), dt.datetime(2024, 1, 1, 12, 0)),
    ("timestamp", dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC), dt.datetime(2024, 1, 1, 7, 0)),
    (
        "timestamp",
        dt.datetime(2024, 7, 1, 12, 0, 0, 123456, tzinfo=ZoneInfo("Asia/Tokyo")),
        dt.datetime(2024, 6, 30, 23, 0, 0, 123456),
    ),
    ("timestamp", dt.datetime(2024, 11, 3, 1, 30), dt.datetime(2024, 11, 3, 1, 30, fold=1)),
    ("timestamp", dt.datetime(2024, 11, 3, 1, 30, fold=1), dt.datetime(2024, 11, 3, 1, 30, fold=1)),
    ("timestamp", pd.Timestamp("2024-01-01 12:00:00.123456"), dt.datetime(2024, 1, 1, 12, 0, 0, 123456)),
    ("timestamp_ntz", dt.datetime(2024, 1, 1, 12), dt.datetime(2024, 1, 1, 12, 0)),
    ("timestamp_ntz", dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC), dt.datetime(2024, 1, 1, 12, 0)),
    ("timestamp_ntz", dt.datetime(1500, 1, 1), dt.datetime(1500, 1, 1, 0, 0)),
    ("interval day to second", pd.Timedelta("1 days 00:00:00.000001999"), dt.timedelta(days=1, microseconds=2)),
    ("interval day to second", np.timedelta64(5, "s"), dt.timedelta(seconds=5)),
    ("interval day to second", pd.NaT, None),
    ("array<bigint>", (1, 2), [1, 2]),
    ("array<bigint>", b"a\xff", [97, -1]),
    ("array<bigint>", bytearray(b"ab"), [97, 98]),
    ("array<bigint>", NAN, None),
    ("array<string>", ["a", 1, True, 1.5, None], ["a", "1", "true", "1.5", None]),
    ("array<string>", b"a", ["97"]),
    ("array<timestamp>", [dt.datetime(2024, 1, 1, 12), None], [dt.datetime(2024, 1, 1, 12, 0), None]),
    ("map<string,bigint>", {1: 2}, {"1": 2}),
    ("map<string,array<double>>", {"a": [1.0, None, NAN]}, {"a": [1.0, None, NAN]}),
    ("struct<a:bigint,b:string>", {"a": 1, "b": "x"}, Row(a=1, b="x")),
    ("struct<a:bigint,b:string>", {"b": "x"}, Row(a=None, b="x")),
    ("struct<a:bigint,b:string>", {}, Row(a=None, b=None)),
    ("struct<a:bigint,b:string>", (1, "x"), Row(a=1, b="x")),
    ("struct<a:bigint,b:string>", [1, "x"], Row(a=1, b="x")),
    ("struct<a:bigint,b:string>", Row(1, "x"), Row(a=1, b="x")),
    ("struct<a:bigint,b:string>", {"a": None}, Row(a=None, b=None)),
    (
        "struct<t:timestamp,d:date>",
        {"t": dt.datetime(2024, 1, 1, 12), "d": dt.date(2024, 1, 1)},
        Row(t=dt.datetime(2024, 1, 1, 12, 0), d=dt.date(2024, 1, 1)),
    ),
    ("struct<t:timestamp,d:date>", (dt.datetime(2024, 1, 1, 12), None), Row(t=dt.datetime(2024, 1, 1, 12, 0), d=None)),
    ("array<struct<a:bigint,b:string>>", [{"a": 1}, (2, "x"), None], [Row(a=1, b=None), Row(a=2, b="x"), None]),
    ("struct<p:struct<a:bigint>>", {"p": {"a": 1}}, Row(p=Row(a=1))),
    ("struct<p:struct<a:bigint>>", {"p": None}, Row(p=None)),
]


@pytest.fixture(autouse=True)
def _in_new_york() -> Iterator[None]:
    """The zone of the process decides over states, and not the session's."""
    with process_in("America/New_York"):
        yield


@pytest.mark.parametrize(("ddl", "value", "kept"), KEPT, ids=[f"{ddl} {value!r}" for ddl, value, _ in KEPT])
def test_what_spark_keeps_is_kept(ddl: str, value: Any, kept: Any) -> None:
    """From `update` in one micro-batch to `get` in the next, by way of the types in which states are stored."""
    schema = StructType().add("x", DayTimeIntervalType()) if ddl.startswith("interval") else parse_schema(f"x {ddl}")
    state = KeyStates(schema, "NoTimeout", 0, None).open(None)
    state.update((value,))
    values = RowValues(schema)
    table = TableSchema.of("state", pa.schema([("key", pa.int64())]), values.arrow)
    [found] = values.to_tuples(table.conform(values.to_arrow([state.value]), "value"))
    assert repr(found) == repr((kept,))
