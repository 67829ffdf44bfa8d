"""Columns of every type, drawn by chance, and damage to their encoded rows; for tests of keys and of rows."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from holdfast.backends.arrow.rows import HashArray, from_columns, normalize_keys, storage_type
from holdfast.errors import CorruptionError
from holdfast.testing.state_rows import plain

#: Types of one leaf whose order bytes must keep, each with a strategy for its values.
ORDERED: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    *((t, st.integers(-(2 ** (t.bit_width - 1)), 2 ** (t.bit_width - 1) - 1))
      for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    (pa.uint16(), st.integers(0, 2**16 - 1)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.decimal128(38, 18), st.decimals(-(10**18), 10**18, places=18, allow_nan=False)),
    (pa.decimal128(5, 2), st.decimals(-999, 999, places=2)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(dt.UTC))),
    (pa.timestamp("us"), st.datetimes()),
    (pa.duration("us"), st.timedeltas(dt.timedelta(-100_000), dt.timedelta(100_000))),
    (pa.time64("us"), st.times()),
    (pa.string(), st.text(max_size=5) | st.text("\0\1\2a", max_size=5)),
    (pa.binary(), st.binary(max_size=4) | st.lists(st.sampled_from([0, 1, 2, 254, 255]), max_size=5).map(bytes)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
]  # fmt: skip


def nest(types: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return strategies for types that hold `types`, as pairs of type and strategy for values."""

    def structs(parts: list[Any]) -> Any:
        fields = pa.struct([pa.field(f"f{i}", t) for i, (t, _) in enumerate(parts)])
        return fields, st.fixed_dictionaries({f"f{i}": st.none() | values for i, (_, values) in enumerate(parts)})

    return types.map(lambda part: (pa.list_(part[0]), st.lists(st.none() | part[1], max_size=3))) | st.lists(
        types, max_size=3
    ).map(structs)


def maps(parts: tuple[Any, Any]) -> Any:
    (key, keys), (item, items) = parts
    return pa.map_(key, item), st.lists(st.tuples(keys, st.none() | items), max_size=3)


leaf_types = st.sampled_from(ORDERED)

key_types = st.recursive(leaf_types, nest, max_leaves=4)

value_types = st.recursive(
    leaf_types | st.just((pa.null(), st.none())),
    lambda types: nest(types) | st.tuples(leaf_types, types).map(maps),
    max_leaves=6,
)


@st.composite
def batches(draw: st.DrawFn, types: st.SearchStrategy[Any], min_columns: int = 0) -> pa.RecordBatch:
    """Draw a batch in storage types: any columns, up to 12 rows with nulls, perhaps a slice of a larger one."""
    chosen = draw(st.lists(types, min_size=min_columns, max_size=4))
    n = draw(st.integers(0, 12))
    columns = [
        pa.array(draw(st.lists(st.none() | values, min_size=n, max_size=n)), storage_type(t)) for t, values in chosen
    ]
    schema = pa.schema([pa.field(f"c{i}", c.type) for i, c in enumerate(columns)])
    return from_columns(columns, schema, n).slice(draw(st.integers(0, 2)))


def normalized(batch: pa.RecordBatch) -> pa.RecordBatch:
    return from_columns([normalize_keys(c) for c in batch.columns], batch.schema, batch.num_rows)


def rows_of(batch: pa.RecordBatch) -> list[Any]:
    return [plain([c[i].as_py() for c in batch.columns]) for i in range(batch.num_rows)]


def assert_same(found: pa.RecordBatch, expected: pa.RecordBatch) -> None:
    for column in found.columns:
        column.validate(full=True)
    assert found.schema == expected.schema
    assert found.num_rows == expected.num_rows
    assert rows_of(found) == rows_of(expected)


def zero_hashes(n: int) -> HashArray:
    return np.zeros(n, np.uint64)


def batch_of(*columns: tuple[pa.DataType, list[Any]]) -> pa.RecordBatch:
    arrays = [pa.array(values, storage_type(t)) for t, values in columns]
    return pa.RecordBatch.from_arrays(arrays, names=[f"c{i}" for i in range(len(arrays))])


def binaries(rows: list[bytes | None]) -> pa.Array:
    return pa.array(rows, pa.large_binary())


def accepted_or_corrupt(decode: Callable[[], pa.RecordBatch], schema: pa.Schema, n: int) -> None:
    """Decode damaged bytes: they must give valid columns of n rows, or an error."""
    try:
        found = decode()
    except CorruptionError:
        return
    assert found.schema == schema
    assert found.num_rows == n
    for column in found.columns:
        column.validate()
        assert_text_is_valid(column)


def assert_text_is_valid(column: pa.Array) -> None:
    if pa.types.is_large_string(column.type):
        column.validate(full=True)
    elif pa.types.is_struct(column.type):
        for child in column.flatten():
            assert_text_is_valid(child)
    elif pa.types.is_large_list(column.type):
        assert_text_is_valid(column.flatten())


@st.composite
def damages(draw: st.DrawFn, rows: list[bytes]) -> list[bytes]:
    """Draw rows of which one is cut, longer, or has other bytes somewhere."""
    rows = list(rows)
    i = draw(st.integers(0, len(rows) - 1))
    row = bytearray(rows[i])
    begin = draw(st.integers(0, len(row)))
    end = draw(st.integers(begin, min(len(row), begin + 4)))
    row[begin:end] = draw(st.binary(max_size=4) | st.sampled_from([b"\0", b"\1", b"\xff\xff\xff\xff", b"\0\0\0\x80"]))
    rows[i] = bytes(row)
    return rows
