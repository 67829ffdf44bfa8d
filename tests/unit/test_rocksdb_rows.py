"""The row codec of RocksDB: exact, injective, ordered, and safe against bytes of any content."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.arrow_rows import HashArray, from_columns, normalize_keys, storage_type
from holdfast.backends.rocksdb_rows import decode_keys, decode_values, encode_keys, encode_values
from holdfast.testing.state_rows import TYPES, VALUE_TYPES, plain

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


@given(batches(value_types))
def test_values_come_back_exactly(batch: pa.RecordBatch) -> None:
    """Any schema, nulls at every depth, slices; a batch without columns keeps its number of rows."""
    rows = encode_values(batch)
    assert rows.type == pa.large_binary()
    assert len(rows) == batch.num_rows
    assert not rows.null_count
    assert_same(decode_values(rows, batch.schema), batch)
    assert_same(decode_values(rows.slice(1), batch.schema), batch.slice(1))


@given(batches(value_types), st.data())
def test_a_null_row_is_a_row_of_nulls(batch: pa.RecordBatch, data: st.DataObject) -> None:
    """What a look-up gives for an absent key; rows beside it are not touched."""
    gone = [data.draw(st.booleans()) for _ in range(batch.num_rows)]
    rows = [None if g else row for g, row in zip(gone, encode_values(batch).to_pylist(), strict=True)]
    expected = [(None,) * batch.num_columns if g else row for g, row in zip(gone, rows_of(batch), strict=True)]
    found = decode_values(binaries(rows), batch.schema)
    assert rows_of(found) == expected
    assert found.schema == batch.schema


@given(batches(key_types, min_columns=1), st.data())
def test_keys_come_back_exactly(batch: pa.RecordBatch, data: st.DataObject) -> None:
    """With their hashes, from slices too."""
    batch = normalized(batch)
    hashes = [data.draw(st.integers(0, 2**64 - 1)) for _ in range(batch.num_rows)]
    keys = encode_keys(7, np.array(hashes, np.uint64), batch)
    assert [key[:1] for key in keys.to_pylist()] == [b"\7"] * len(hashes)
    for skip in (0, 1):
        found_hashes, found = decode_keys(keys.slice(skip), batch.schema)
        assert found_hashes.tolist() == hashes[skip:]
        assert_same(found, batch.slice(skip))


@given(batches(key_types, min_columns=1))
def test_keys_are_equal_only_where_their_columns_are_and_begin_with_their_first_columns(batch: pa.RecordBatch) -> None:
    """A prefix scan for the first columns finds exactly the keys that have them."""
    batch = normalized(batch)
    hashes = zero_hashes(batch.num_rows)
    keys = encode_keys(0, hashes, batch).to_pylist()
    rows = rows_of(batch)
    for count in range(batch.num_columns + 1):
        prefixes = encode_keys(0, hashes, batch.select(range(count))).to_pylist()
        for i, prefix in enumerate(prefixes):
            assert [key.startswith(prefix) for key in keys] == [row[:count] == rows[i][:count] for row in rows]


@given(
    batches(leaf_types | leaf_types.map(lambda p: (pa.struct([("f", p[0])]), st.fixed_dictionaries({"f": p[1]}))), 1)
)
def test_bytes_of_keys_are_in_the_order_of_the_values(batch: pa.RecordBatch) -> None:
    """Nulls first, NaN last, negative before positive; strings and binaries by their bytes; column by column."""
    batch = normalized(batch)
    keys = encode_keys(0, zero_hashes(batch.num_rows), batch).to_pylist()
    rows = [[c[i].as_py() for c in batch.columns] for i in range(batch.num_rows)]
    order = [rank(row) for row in rows]
    assert sorted(range(len(rows)), key=keys.__getitem__) == sorted(range(len(rows)), key=order.__getitem__)


def rank(value: Any) -> Any:
    """Return what Python sorts as keys must be: nulls first, strings by their bytes."""
    if value is None:
        return (0,)
    if isinstance(value, list):
        return [rank(v) for v in value]
    if isinstance(value, dict):
        return (1, [rank(v) for v in value.values()])
    if isinstance(value, float):
        return (1, math.isnan(value), 0.0 if math.isnan(value) else value)
    return (1, value.encode() if isinstance(value, str) else value)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("ab", "c"), ("a", "bc")),
        ((None, "a"), ("", "a")),
        (("", None), (None, "")),
        (("a\0", ""), ("a", "\0")),
        (("a\1\2", "b"), ("a\1", "b")),
        (("a\0", "b"), ("a\1\1", "b")),
        (("\0", None), ("", None)),
        (("a" * 2**20, "b"), ("a" * 2**20 + "b", "")),
    ],
)
@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_keys_that_look_alike_differ(left: tuple[Any, Any], right: tuple[Any, Any], kind: pa.DataType) -> None:
    """Null and empty, strings that run together, NUL bytes and the bytes that stand for them, 1 MiB."""
    batch = batch_of(*((kind, [a, b]) for a, b in zip(left, right, strict=True)))
    keys = encode_keys(1, zero_hashes(2), batch)
    one, other = keys.to_pylist()
    assert not one.startswith(other)
    assert not other.startswith(one)
    assert_same(decode_keys(keys, batch.schema)[1], batch)


@pytest.mark.parametrize(("t", "one", "other"), TYPES + VALUE_TYPES, ids=lambda v: str(v)[:20])
def test_every_type_of_state_goes_through(t: pa.DataType, one: Any, other: Any) -> None:
    """Also columns of nulls only, and columns without rows."""
    for values in ([one, other, None, one], [None], []):
        batch = batch_of((t, values), (pa.string(), ["x"] * len(values)), (t, values))
        assert_same(decode_values(encode_values(batch), batch.schema), batch)
        batch = normalized(batch) if (t, one, other) in TYPES else batch
        keys = encode_keys(1, zero_hashes(len(values)), batch)
        assert_same(decode_keys(keys, batch.schema)[1], batch)
