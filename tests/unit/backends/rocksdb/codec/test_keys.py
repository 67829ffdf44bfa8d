"""Keys of RocksDB: what was put comes back, bytes sort as the values do, and damage is noticed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.backends.arrow.rows import storage_type
from holdfast.backends.rocksdb.codec.keys import KEY_HEADER_BYTES, decode_keys, encode_keys
from holdfast.errors import CorruptionError
from tests.unit.backends.rocksdb.codec.columns import (
    accepted_or_corrupt,
    assert_same,
    batch_of,
    batches,
    binaries,
    damages,
    key_types,
    leaf_types,
    normalized,
    rows_of,
    zero_hashes,
)


@pytest.mark.slow
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


@pytest.mark.slow(1)
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


@pytest.mark.slow(0.5)
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


@pytest.mark.slow(0.5)
@given(batches(key_types, min_columns=1), st.data())
def test_damaged_keys_are_refused_or_decode_into_valid_columns(batch: pa.RecordBatch, data: st.DataObject) -> None:
    """As values."""
    assume(batch.num_rows)
    batch = normalized(batch)
    keys = data.draw(damages(encode_keys(1, zero_hashes(batch.num_rows), batch).to_pylist()))
    accepted_or_corrupt(lambda: decode_keys(binaries(keys), batch.schema)[1], batch.schema, batch.num_rows)


@pytest.mark.parametrize(
    ("types", "key"),
    [
        ([pa.int8()], "01"),
        ([pa.int8()], "0180 00"),
        ([pa.int8()], "0280"),
        ([pa.bool_()], "0102"),
        ([pa.string()], "01"),
        ([pa.string()], "0161"),
        ([pa.string()], "016100 00"),
        ([pa.string()], "0161010300"),
        ([pa.string()], "01610100"),
        ([pa.string()], "0161006200"),
        ([pa.string(), pa.int8()], "0161000180 00"),
        ([pa.string(), pa.string()], "0161000162"),
        ([pa.string(), pa.string()], "0161"),
        ([pa.string(), pa.string()], "01610001620000"),
    ],
)
def test_keys_that_do_not_add_up_are_corrupt(types: list[pa.DataType], key: str) -> None:
    """Cut, too long, without an end, or with a byte that the format never writes there."""
    schema = pa.schema([(str(i), storage_type(t)) for i, t in enumerate(types)])
    rows = [bytes(KEY_HEADER_BYTES) + bytes.fromhex(key), bytes(KEY_HEADER_BYTES - 1)]
    with pytest.raises(CorruptionError):
        decode_keys(binaries(rows[:1]), schema)
    with pytest.raises(CorruptionError):
        decode_keys(binaries(rows[1:]), schema)
