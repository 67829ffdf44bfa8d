"""The row codec of RocksDB: exact, injective, ordered, and safe against bytes of any content."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.backends.arrow.rows import storage_type
from holdfast.backends.rocksdb.codec.keys import decode_keys, encode_keys
from holdfast.backends.rocksdb.codec.rows import decode_values, encode_values
from holdfast.errors import CorruptionError, InvalidArgumentError
from holdfast.testing.state_rows import TYPES, VALUE_TYPES
from tests.unit.backends.rocksdb.codec.columns import (
    accepted_or_corrupt,
    assert_same,
    batch_of,
    batches,
    binaries,
    damages,
    normalized,
    rows_of,
    value_types,
    zero_hashes,
)


@pytest.mark.slow(1)
@given(batches(value_types))
def test_values_come_back_exactly(batch: pa.RecordBatch) -> None:
    """Any schema, nulls at every depth, slices; a batch without columns keeps its number of rows."""
    rows = encode_values(batch)
    assert rows.type == pa.large_binary()
    assert len(rows) == batch.num_rows
    assert not rows.null_count
    assert_same(decode_values(rows, batch.schema), batch)
    assert_same(decode_values(rows.slice(1), batch.schema), batch.slice(1))


@pytest.mark.slow(1)
@given(batches(value_types), st.data())
def test_a_null_row_is_a_row_of_nulls(batch: pa.RecordBatch, data: st.DataObject) -> None:
    """What a look-up gives for an absent key; rows beside it are not touched."""
    gone = [data.draw(st.booleans()) for _ in range(batch.num_rows)]
    rows = [None if g else row for g, row in zip(gone, encode_values(batch).to_pylist(), strict=True)]
    expected = [(None,) * batch.num_columns if g else row for g, row in zip(gone, rows_of(batch), strict=True)]
    found = decode_values(binaries(rows), batch.schema)
    assert rows_of(found) == expected
    assert found.schema == batch.schema


@pytest.mark.parametrize(("t", "one", "other"), TYPES + VALUE_TYPES, ids=lambda v: str(v)[:20])
def test_every_type_of_state_goes_through(t: pa.DataType, one: Any, other: Any) -> None:
    """Also columns of nulls only, and columns without rows."""
    for values in ([one, other, None, one], [None], []):
        batch = batch_of((t, values), (pa.string(), ["x"] * len(values)), (t, values))
        assert_same(decode_values(encode_values(batch), batch.schema), batch)
        batch = normalized(batch) if (t, one, other) in TYPES else batch
        keys = encode_keys(1, zero_hashes(len(values)), batch)
        assert_same(decode_keys(keys, batch.schema)[1], batch)


#: Type, values, and of each value the bytes of a key (without its header) and of a value.
GOLDEN: list[tuple[pa.DataType, list[Any], list[str], list[str]]] = [
    (
        pa.uint16(),
        [258, 65535, None],
        ["010102", "01ffff", "000000"],
        ["000201", "00ffff", "010000"],
    ),
    (
        pa.string(),
        ["añ", None, "\0\1\2", ""],
        ["0161c3b100", "0000", "01010101020200", "0100"],
        ["000300000061c3b1", "0100000000", "0003000000000102", "0000000000"],
    ),
    (
        pa.int64(),
        [1, -2, None],
        ["018000000000000001", "017ffffffffffffffe", "000000000000000000"],
        ["000100000000000000", "00feffffffffffffff", "010000000000000000"],
    ),
    (
        pa.int8(),
        [-128, 127, None],
        ["0100", "01ff", "0000"],
        ["0080", "007f", "0100"],
    ),
    (
        pa.bool_(),
        [True, False, None],
        ["0101", "0100", "0000"],
        ["0001", "0000", "0100"],
    ),
    (
        pa.float64(),
        [1.5, -1.5, None, math.nan],
        ["01bff8000000000000", "014007ffffffffffff", "000000000000000000", "01fff8000000000000"],
        ["00000000000000f83f", "00000000000000f8bf", "010000000000000000", "00000000000000f87f"],
    ),
    (
        pa.float32(),
        [-math.inf, 0.0, None],
        ["01007fffff", "0180000000", "0000000000"],
        ["00000080ff", "0000000000", "0100000000"],
    ),
    (
        pa.decimal128(20, 2),
        [Decimal("-0.01"), Decimal("1.28"), None],
        [
            "017fffffffffffffffffffffffffffffff",
            "0180000000000000000000000000000080",
            "0000000000000000000000000000000000",
        ],
        [
            "00ffffffffffffffffffffffffffffffff",
            "0080000000000000000000000000000000",
            "0100000000000000000000000000000000",
        ],
    ),
    (
        pa.date32(),
        [dt.date(1969, 12, 31), dt.date(9999, 12, 31), None],
        ["017fffffff", "01802cc0a0", "0000000000"],
        ["00ffffffff", "00a0c02c00", "0100000000"],
    ),
    (
        pa.timestamp("us", "UTC"),
        [dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC), None],
        ["0180000000000f4240", "000000000000000000"],
        ["0040420f0000000000", "010000000000000000"],
    ),
    (
        pa.binary(),
        [b"\xff", b"\0", None],
        ["01ff00", "01010100", "0000"],
        ["0001000000ff", "000100000000", "0100000000"],
    ),
    (
        pa.struct([("x", pa.int16()), ("y", pa.string())]),
        [{"x": 1, "y": "z"}, {"x": None, "y": None}, None],
        ["01018001017a00", "010000000000", "000000000000"],
        ["000100010000007a", "06000000000000", "07000000000000"],
    ),
    (
        pa.list_(pa.int8()),
        [[1, None], [], None],
        ["01010101020102010100", "0100", "0000"],
        ["000400000000010100", "0000000000", "0100000000"],
    ),
    (
        pa.list_(pa.string()),
        [["ab", None, ""], [], None],
        [
            "01070101010101010501010101010105010101010101000101020101010101016162010201010101010101010101010101010101010100",
            "010000",
            "000000",
        ],
        [
            "000c000000110000000700000005000000050000000002000000616201000000000000000000",
            "000000000000000000",
            "010000000000000000",
        ],
    ),
    (
        pa.map_(pa.string(), pa.int8()),
        [[("k", 7)], [], None],
        ["01070101010101010001010701020101010101016b00", "010000", "000000"],
        ["000400000007000000070000000007010000006b", "000000000000000000", "010000000000000000"],
    ),
    (
        pa.null(),
        [None],
        ["00"],
        ["01"],
    ),
]


@pytest.mark.parametrize(("t", "values", "keys", "rows"), GOLDEN, ids=lambda v: str(v)[:20])
def test_stored_bytes_are_what_the_format_says(
    t: pa.DataType, values: list[Any], keys: list[str], rows: list[str]
) -> None:
    """These bytes are in databases that exist: a codec that writes or reads others loses state."""
    batch = batch_of((t, values))
    header = "01fedcba9876543210"
    hashes = np.full(len(values), 0xFEDCBA9876543210, np.uint64)
    assert [key.hex() for key in encode_keys(1, hashes, batch).to_pylist()] == [header + key for key in keys]
    assert [row.hex() for row in encode_values(batch).to_pylist()] == rows
    found_hashes, found = decode_keys(binaries([bytes.fromhex(header + key) for key in keys]), batch.schema)
    assert found_hashes.tolist() == hashes.tolist()
    assert_same(found, batch)
    assert_same(decode_values(binaries([bytes.fromhex(row) for row in rows]), batch.schema), batch)


def test_a_row_of_many_columns_is_what_the_format_says() -> None:
    """Nine leaves need two bytes of null bits; fixed bytes, lengths and pieces follow in the order of columns."""
    batch = batch_of(
        (pa.string(), ["ab"]),
        *[(pa.int8(), [i or None]) for i in range(7)],
        (pa.binary(), [b"c"]),
        (pa.int16(), [None]),
    )
    (row,) = encode_values(batch).to_pylist()
    assert row.hex(" ") == "02 02 00 01 02 03 04 05 06 00 00 02 00 00 00 01 00 00 00 61 62 63"
    (key,) = encode_keys(2, np.array([3], np.uint64), batch).to_pylist()
    marked = "01 81 01 82 01 83 01 84 01 85 01 86"
    assert key.hex(" ") == f"02 00 00 00 00 00 00 00 03 01 61 62 00 00 00 {marked} 01 63 00 00 00 00"
    assert_same(decode_values(binaries([row]), batch.schema), batch)
    assert_same(decode_keys(binaries([key]), batch.schema)[1], batch)


@pytest.mark.slow(1)
@given(batches(value_types, min_columns=1), st.data())
def test_damaged_values_are_refused_or_decode_into_valid_columns(batch: pa.RecordBatch, data: st.DataObject) -> None:
    """Whatever stands there, nothing is read outside the row and no column is malformed."""
    assume(batch.num_rows)
    rows = data.draw(damages(encode_values(batch).to_pylist()))
    accepted_or_corrupt(lambda: decode_values(binaries(rows), batch.schema), batch.schema, batch.num_rows)


@pytest.mark.parametrize(
    ("t", "row"),
    [
        (pa.int64(), "00 01000000000000"),
        (pa.int64(), "00 0100000000000000 00"),
        (pa.bool_(), "00 02"),
        (pa.string(), "00 000000"),
        (pa.string(), "00 02000000 61"),
        (pa.string(), "00 00000000 61"),
        (pa.list_(pa.int64()), "00 04000000 00000000"),
        (pa.list_(pa.string()), "00 03000000 06000000 060000 000100000061"),
        (pa.list_(pa.string()), "00 05000000 06000000 0600000000 000100000061"),
        (pa.list_(pa.string()), "00 04000000 06000000 05000000 000100000061"),
        (pa.list_(pa.string()), "00 04000000 06000000 ffffffff 000100000061"),
        (pa.list_(pa.string()), "00 04000000 06000000 06000000 000200000061"),
    ],
)
def test_values_that_do_not_add_up_are_corrupt(t: pa.DataType, row: str) -> None:
    """Each length is checked against the next one, at every depth."""
    schema = pa.schema([("c", storage_type(t))])
    good = encode_values(pa.RecordBatch.from_arrays([pa.nulls(1, schema[0].type)], schema=schema)).to_pylist()
    for rows in ([bytes.fromhex(row)], [*good, bytes.fromhex(row), *good]):
        with pytest.raises(CorruptionError):
            decode_values(binaries(rows), schema)


def test_what_lies_under_a_null_does_not_show() -> None:
    """Arrow leaves anything there; bytes of equal rows must be equal."""
    mask = pa.array([False, True, True])
    lists = pa.LargeListArray.from_arrays(pa.array([0, 1, 2, 3]), pa.array([1, 2, 3], pa.int8()), mask=mask)
    numbers = pa.Array.from_buffers(pa.int32(), 3, [pa.py_buffer(b"\1"), pa.py_buffer(bytes(range(12)))])
    offsets = pa.py_buffer(np.arange(4))
    texts = pa.Array.from_buffers(pa.large_string(), 3, [pa.py_buffer(b"\1"), offsets, pa.py_buffer(b"abc")])
    parts = pa.StructArray.from_arrays([pa.array([1, 2, 3])], ["x"], mask=mask)
    batch = pa.RecordBatch.from_arrays([lists, numbers, texts, parts], names=list("abcd"))
    _, one, other = encode_values(batch).to_pylist()
    assert one == other
    _, one, other = encode_keys(1, zero_hashes(3), batch).to_pylist()
    assert one == other
    clean = pa.RecordBatch.from_pylist(batch.to_pylist(), schema=batch.schema)
    assert encode_values(batch).equals(encode_values(clean))
    assert_same(decode_values(encode_values(batch), batch.schema), batch)


def test_values_keep_every_bit_of_floats() -> None:
    """Only keys are normalised: a value -0.0 stays negative, a NaN keeps its payload."""
    bits = np.array([1 << 63, 0x7FF8_0000_0000_0001, 0xFFF8_0000_0000_0000], np.uint64)
    batch = pa.RecordBatch.from_arrays([pa.array(bits.view(np.float64))], names=["x"])
    found = decode_values(encode_values(batch), batch.schema).column(0)
    assert found.to_numpy().view(np.uint64).tolist() == bits.tolist()


@pytest.mark.slow(1)
def test_large_batches_and_large_values() -> None:
    """More than 2^16 rows and elements, strings of 1 MiB with NUL bytes."""
    n = 2**16 + 3
    numbers = np.arange(n) * 7919 % n
    texts = pa.array([f"user-{i}" if i % 5 else None for i in numbers], pa.large_string())
    lists = pa.LargeListArray.from_arrays(pa.array([0] * n + [n]), pa.array(numbers))
    batch = pa.RecordBatch.from_arrays([texts, pa.array(numbers), lists, texts], names=list("abcd"))
    assert decode_values(encode_values(batch), batch.schema).equals(batch)
    hashes = np.random.default_rng(1).integers(0, 2**64, n, np.uint64)
    found_hashes, found = decode_keys(encode_keys(255, hashes, batch), batch.schema)
    assert (found_hashes == hashes).all()
    assert found.equals(batch)
    large = batch_of((pa.binary(), [b"\0\1\2" * 2**20, b"", None]), (pa.string(), ["x" * 2**20] * 3))
    assert_same(decode_values(encode_values(large), large.schema), large)
    assert_same(decode_keys(encode_keys(1, zero_hashes(3), large), large.schema)[1], large)


def test_what_cannot_be_stored_is_said() -> None:
    """A type without a place in the format, a table id of more than a byte."""
    odd = pa.RecordBatch.from_arrays([pa.array(["a"]).dictionary_encode()], names=["d"])
    with pytest.raises(InvalidArgumentError, match="dictionary"):
        encode_values(odd)
    for table_id in (-1, 256):
        with pytest.raises(InvalidArgumentError, match=f"table_id={table_id}"):
            encode_keys(table_id, zero_hashes(1), batch_of((pa.int8(), [1])))


def test_a_string_has_the_bytes_that_were_put() -> None:
    """Spark validates no string, so neither do we: what is not UTF-8 is carried, at any depth, in keys and values."""
    texts = pa.array([b"\xff", b"\0\x80\1", "ü".encode(), None], pa.large_binary()).view(pa.large_string())
    lists = pa.LargeListArray.from_arrays(pa.array([0, 1, 1, 3, 4]), texts)
    schema = pa.schema([("s", texts.type), ("l", lists.type)])
    rows = pa.RecordBatch.from_arrays([texts, lists], schema=schema)
    assert decode_values(encode_values(rows), schema).equals(rows)
    hashes = np.arange(4, dtype=np.uint64)
    assert decode_keys(encode_keys(1, hashes, rows), schema)[1].equals(rows)


def test_a_map_with_a_null_among_its_keys_is_corrupt() -> None:
    """Arrow would end the process."""
    schema = pa.schema([("m", pa.map_(pa.int64(), pa.int64()))])
    good = encode_values(pa.RecordBatch.from_arrays([pa.array([[(1, 2)]], schema[0].type)], schema=schema))
    row = bytearray(good.to_pylist()[0])
    row[1 + 4] |= 1  # after the row's null bits and the length of its piece: those of the first element
    with pytest.raises(CorruptionError, match="null among its keys"):
        decode_values(binaries([bytes(row)]), schema)
