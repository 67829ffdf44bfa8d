"""A key is looked up as it was given, or refused: never another one that it was cut down to."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends.run import TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.lookup.keys import key_option, keys_of, parse_key

UTC = dt.UTC
NESTED = pa.struct([("a", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
NOON = dt.datetime(2024, 1, 2, 12, tzinfo=UTC)


def key_of(value: object, t: pa.DataType) -> Any:
    table = TableSchema.of("state", pa.schema([("k", t)]), pa.schema([("v", pa.int64())]))
    return keys_of(table, ("k",), [{"k": value}]).columns.column(0)[0].as_py()


@pytest.mark.parametrize(
    ("value", "t"),
    [
        (1.5, pa.int64()),
        (Decimal("1.5"), pa.int64()),
        (float("nan"), pa.int8()),
        (300, pa.int8()),
        (True, pa.int64()),
        (1, pa.bool_()),
        (1.5, pa.decimal128(10, 2)),
        (Decimal("1.005"), pa.decimal128(10, 2)),
        (10**18, pa.timestamp("us", "UTC")),
        (1, pa.duration("us")),
        (1, pa.date32()),
        (NOON, pa.date32()),
        (NOON, pa.timestamp("us")),
        (NOON.replace(tzinfo=None), pa.timestamp("us", "UTC")),
        ("2024-01-02T12:00:00", pa.timestamp("us", "UTC")),
        (b"ann", pa.large_string()),
        ("\ud800", pa.large_string()),
        ("no base64!", pa.large_binary()),
        (b"ab", pa.large_list(pa.int64())),
        ("ab", pa.large_list(pa.int64())),
        ([1.5], pa.large_list(pa.int64())),
        ({"a": 1}, NESTED),
        ({"a": 1, "t": None, "b": 2}, NESTED),
        ({"a": True, "t": None}, NESTED),
        (object(), NESTED),
    ],
)
def test_a_value_of_another_type_is_refused(value: object, t: pa.DataType) -> None:
    """Arrow would leave out digits, zones and fields, and the answer would be another key's."""
    with pytest.raises(InvalidArgumentError, match="is not of its type"):
        key_of(value, t)


def test_a_refused_value_is_told_by_the_type_that_it_has_and_the_one_that_the_key_has() -> None:
    with pytest.raises(InvalidArgumentError, match=r"the key's 'k' is not of its type: it is int, type=string$"):
        key_of(5, pa.large_string())


@pytest.mark.parametrize(
    ("value", "t", "wanted"),
    [
        (2.0, pa.int64(), 2),
        ("-7", pa.int64(), -7),
        (3, pa.float64(), 3.0),
        (3, pa.decimal128(10, 2), Decimal("3.00")),
        ("2024-01-02T13:00:00+01:00", pa.timestamp("us", "UTC"), NOON),
        ("2024-01-02", pa.date32(), dt.date(2024, 1, 2)),
        ("YW5u", pa.large_binary(), b"ann"),
        ({"a": 1, "t": "2024-01-02T12:00:00Z"}, NESTED, {"a": 1, "t": NOON}),
        ({"a": None, "t": NOON}, NESTED, {"a": None, "t": NOON}),
        (["1", None], pa.large_list(pa.int64()), [1, None]),
    ],
)
def test_a_value_is_taken_as_it_is(value: object, t: pa.DataType, wanted: object) -> None:
    """Numbers, and texts as JSON has them, at every depth."""
    assert key_of(value, t) == wanted
    if not isinstance(value, dict | list):
        assert key_of(parse_key(key_option({"k": value}))["k"], t) == wanted
