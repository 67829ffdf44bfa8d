"""Upserts of a Delta table by several keys, of all types, with nulls in each: the table is what a dict would be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from tests.tiers import cases
from tests.unit.spark_integration.sinks.delta_writer import opened

pytestmark = pytest.mark.slow(20)

#: Types of keys, each with values that it may have besides null.
TYPES: dict[str, tuple[pa.DataType, Sequence[Any]]] = {
    "boolean": (pa.bool_(), [True, False]),
    "long": (pa.int64(), [-(1 << 63), 0, 7]),
    "string": (pa.string(), ["a", "A", "a AND b", 'it\'s "x"']),
    "date": (pa.date32(), [date(1, 1, 1), date(2024, 2, 29)]),
    "timestamp": (pa.timestamp("us", "UTC"), [datetime(2024, 1, 1, 0, 0, 0, 1, UTC), datetime(1969, 1, 1, tzinfo=UTC)]),
    "decimal": (pa.decimal128(20, 2), [Decimal("-1.25"), Decimal("123456789012345678.99")]),
    "binary": (pa.binary(), [b"", b"\x00\xff"]),
}
APART = {"boolean", "long", "string", "date"}


def _micro_batches(rng: random.Random, keys: Sequence[str], count: int, rows: int) -> list[list[dict[str, Any]]]:
    """Return rows whose keys are drawn from all values and null, and whose value tells which row it is."""
    drawn = [[None, *TYPES[key][1]] for key in keys]
    return [
        [
            {**{f"k{i}": rng.choice(values) for i, values in enumerate(drawn)}, "n": 1000 * batch + row}
            for row in range(rows)
        ]
        for batch in range(count)
    ]


KEYS = [
    ("boolean", "long"),
    ("long", "boolean"),
    ("boolean", "boolean", "string"),
    ("string", "date", "long"),
    ("timestamp", "decimal"),
    ("decimal", "boolean"),
    ("binary", "string"),
    ("date", "binary", "boolean", "timestamp"),
]
#: Without a partition column, and with each key in turn that may be one.
CASES = [(keys, part) for keys in KEYS for part in [None, *(i for i, key in enumerate(keys) if key in APART)]]


@pytest.mark.parametrize(
    ("keys", "part"), cases(CASES, 10), ids=lambda each: each if isinstance(each, int) else "-".join(each or ["whole"])
)
def test_rows_of_several_keys_take_the_place_of_those_with_the_same(
    tmp_path: Path, keys: tuple[str, ...], part: int | None
) -> None:
    """A null equals a null, in whichever key; a row never takes the place of one with another key."""
    url, named = str(tmp_path / "table"), [f"k{i}" for i in range(len(keys))]
    schema = pa.schema([*((name, TYPES[key][0]) for name, key in zip(named, keys, strict=True)), ("n", pa.int64())])
    writer = opened(DeltaSink("out", url, named, [] if part is None else [named[part]], create=True), schema)
    expected: dict[tuple[Any, ...], int] = {}
    for batch, rows in enumerate(_micro_batches(random.Random(7), keys, count=4, rows=9)):
        writer.write(batch, pa.RecordBatch.from_pylist(rows, schema).columns)
        expected |= {tuple(row[name] for name in named): row["n"] for row in rows}
        shown = writer.rows()
        assert {tuple(row[name] for name in named): row["n"] for row in shown} == expected
        assert len(shown) == len(expected)
