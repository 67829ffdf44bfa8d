"""Upserts by several keys, of all types, with nulls in each: the table is what a dict would be."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tests.servers.postgres import Postgres
from tests.sinks.postgres.attempts import case

pytestmark = pytest.mark.postgres

#: Types of keys, each with values that it may have besides null.
TYPES: dict[str, tuple[pa.DataType, Sequence[Any]]] = {
    "boolean": (pa.bool_(), [True, False]),
    "bigint": (pa.int64(), [-(1 << 63), 0, 7]),
    "text": (pa.string(), ["", "a", "A", "NULL", "a\tb"]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(2024, 2, 29)]),
    "timestamptz": (pa.timestamp("us", "UTC"), [dt.datetime(2024, 1, 1, 0, 0, 0, 1, dt.UTC)]),
    "numeric(20,2)": (pa.decimal128(20, 2), [Decimal("-1.25"), Decimal("123456789012345678.99")]),
    "bytea": (pa.binary(), [b"", b"\x00\xff"]),
    "interval": (pa.duration("us"), [dt.timedelta(days=-3), dt.timedelta(microseconds=7)]),
    "integer[]": (pa.list_(pa.int32()), [[], [1, None]]),
    "jsonb": (pa.struct([("a", pa.bool_())]), [{"a": True}, {"a": None}]),
}


@pytest.mark.parametrize(
    "keys",
    [
        ("boolean", "bigint"),
        ("bigint", "boolean"),
        ("boolean", "boolean", "text"),
        ("date", "bytea", "boolean", "timestamptz"),
        ("numeric(20,2)", "interval"),
        ("integer[]", "boolean"),
        ("text", "jsonb"),
    ],
    ids="-".join,
)
def test_rows_of_several_keys_take_the_place_of_those_with_the_same(postgres: Postgres, keys: tuple[str, ...]) -> None:
    """Where the unique index says that nulls are equal, they are, in whichever key."""
    named = [f"k{i}" for i in range(len(keys))]
    columns = ", ".join(f"{name} {key}" for name, key in zip(named, keys, strict=True))
    made = case(postgres, f"{columns}, n bigint, UNIQUE NULLS NOT DISTINCT ({', '.join(named)})", keys=named)
    schema = pa.schema([*((name, TYPES[key][0]) for name, key in zip(named, keys, strict=True)), ("n", pa.int64())])
    made.open(schema)
    rng, expected = random.Random(7), dict[str, int]()
    for batch in range(3):
        parts = [[(*(rng.choice([None, *TYPES[key][1]]) for key in keys), 100 * batch + row) for row in range(8)]]
        parts.append([(*row[:-1], row[-1] + 50) for row in parts[0][:3]])
        handles = [made.prepared(*rows, batch_id=batch, partition=i, schema=schema) for i, rows in enumerate(parts)]
        made.confirm(*handles, batch_id=batch)
        made.commit(*handles, batch_id=batch)
        expected |= {str(row[:-1]): row[-1] for rows in parts for row in rows}
        shown = made.rows()
        assert {str(tuple(_plain(key) for key in row[:-1])): row[-1] for row in shown} == expected
        assert len(shown) == len(expected)


def _plain(value: Any) -> Any:
    """Return a value as the test has it: psycopg may give it in another zone."""
    return value.astimezone(dt.UTC) if isinstance(value, dt.datetime) else value
