"""Keys, rows and schemas as bytes: keys sort as they should, and what is damaged is an error."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.backends.arrow.rows import HashArray, from_columns, normalize_keys, storage_type
from holdfast.backends.rocksdb.codec.keys import KEY_HEADER_BYTES, decode_keys, encode_keys
from holdfast.backends.rocksdb.codec.rows import decode_numbered, decode_values, encode_values
from holdfast.errors import CorruptionError, InvalidArgumentError
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
    assume(batch.num_rows)
    batch = normalized(batch)
    keys = data.draw(damages(encode_keys(1, zero_hashes(batch.num_rows), batch).to_pylist()))
    accepted_or_corrupt(lambda: decode_keys(binaries(keys), batch.schema)[1], batch.schema, batch.num_rows)


@pytest.mark.parametrize(
    ("types", "key"),
    [
        (types, key)
        for types, keys in (
            ([pa.int8()], ["01", "0180 00", "0280"]),
            ([pa.bool_()], ["0102"]),
            ([pa.string()], ["01", "0161", "016100 00", "0161010300", "01610100", "0161006200"]),
            ([pa.string(), pa.int8()], ["0161000180 00"]),
            ([pa.string(), pa.string()], ["0161000162", "0161", "01610001620000"]),
        )
        for key in keys
    ],
)
def test_keys_that_do_not_add_up_are_corrupt(types: list[pa.DataType], key: str) -> None:
    """Cut, too long, without an end, or with a byte that the format never writes there."""
    schema = pa.schema([(str(i), storage_type(t)) for i, t in enumerate(types)])
    rows = [bytes(KEY_HEADER_BYTES) + bytes.fromhex(key), bytes(KEY_HEADER_BYTES - 1)]
    for row in rows:
        with pytest.raises(CorruptionError):
            decode_keys(binaries([row]), schema)


OLD = pa.schema([("n", pa.int32())])
NEW = pa.schema([("n", pa.int64()), ("note", pa.large_string())])
NOTHING = pa.schema([])
SCHEMAS = (OLD, NOTHING, NEW)


def encoded_rows(number: int, *rows: dict[str, object]) -> list[bytes]:
    schema = SCHEMAS[number - 1]
    columns = [pa.array([row[f.name] for row in rows], f.type) for f in schema]
    batch = (
        pa.RecordBatch.from_arrays(columns, schema=schema)
        if columns
        else pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), len(rows), [None]))
    )
    return encode_values(batch, bytes([number])).to_pylist()


def decoded(rows: list[bytes | None]) -> list[dict[str, object]]:
    return decode_numbered(pa.array(rows, pa.large_binary()), SCHEMAS, NEW).to_pylist()


def test_each_row_is_decoded_with_its_own_schema() -> None:
    """In any order, absent rows among them; also where all rows have one schema."""
    old = encoded_rows(1, {"n": 1}, {"n": None})
    new = encoded_rows(3, {"n": 2**40, "note": "x"}, {"n": 3, "note": None})
    [nothing] = encoded_rows(2, {})
    one, three, large = ({"n": n, "note": note} for n, note in ((1, None), (3, None), (2**40, "x")))
    absent = {"n": None, "note": None}
    assert nothing == b"\2"
    found = decoded([new[1], None, old[0], nothing, new[0], old[1], None])
    assert found == [three, absent, one, absent, large, absent, absent]
    assert decoded([old[0], None]) == [one, absent]
    assert decoded([None, None]) == [absent, absent]
    assert decoded([]) == []
    sliced = pa.array([old[0], None, new[0]], pa.large_binary()).slice(1)
    assert decode_numbered(sliced, SCHEMAS, NEW).to_pylist() == [absent, large]


@pytest.mark.parametrize("row", [b"", b"\0\0", b"\4\0\0\0\0\0", b"\1\0", b"\2\0", b"\3"])
def test_bytes_that_are_no_row_are_damage(row: bytes) -> None:
    """An unknown number, none, or the bytes of another schema."""
    for rows in ([encoded_rows(1, {"n": 1})[0], row], [row]):
        with pytest.raises(CorruptionError):
            decoded([*rows])


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


#: Of each type some values, each with the bytes of a key (without its header) and of a value.
GOLDEN: list[tuple[pa.DataType, list[tuple[Any, str, str]]]] = [
    (pa.uint16(), [(258, "010102", "000201"), (65535, "01ffff", "00ffff"), (None, "000000", "010000")]),
    (pa.string(), [
        ("añ", "0161c3b100", "000300000061c3b1"), (None, "0000", "0100000000"),
        ("\0\1\2", "01010101020200", "0003000000000102"), ("", "0100", "0000000000"),
    ]),
    (pa.int64(), [
        (1, "018000000000000001", "000100000000000000"), (-2, "017ffffffffffffffe", "00feffffffffffffff"),
        (None, "000000000000000000", "010000000000000000"),
    ]),
    (pa.int8(), [(-128, "0100", "0080"), (127, "01ff", "007f"), (None, "0000", "0100")]),
    (pa.bool_(), [(True, "0101", "0001"), (False, "0100", "0000"), (None, "0000", "0100")]),
    (pa.float64(), [
        (1.5, "01bff8000000000000", "00000000000000f83f"), (-1.5, "014007ffffffffffff", "00000000000000f8bf"),
        (None, "000000000000000000", "010000000000000000"), (math.nan, "01fff8000000000000", "00000000000000f87f"),
    ]),
    (pa.float32(), [
        (-math.inf, "01007fffff", "00000080ff"), (0.0, "0180000000", "0000000000"), (None, "0000000000", "0100000000"),
    ]),
    (pa.decimal128(20, 2), [
        (Decimal("-0.01"), "017fffffffffffffffffffffffffffffff", "00ffffffffffffffffffffffffffffffff"),
        (Decimal("1.28"), "0180000000000000000000000000000080", "0080000000000000000000000000000000"),
        (None, "0000000000000000000000000000000000", "0100000000000000000000000000000000"),
    ]),
    (pa.date32(), [
        (dt.date(1969, 12, 31), "017fffffff", "00ffffffff"), (dt.date(9999, 12, 31), "01802cc0a0", "00a0c02c00"),
        (None, "0000000000", "0100000000"),
    ]),
    (pa.timestamp("us", "UTC"), [
        (dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC), "0180000000000f4240", "0040420f0000000000"),
        (None, "000000000000000000", "010000000000000000"),
    ]),
    (pa.binary(), [
        (b"\xff", "01ff00", "0001000000ff"), (b"\0", "01010100", "000100000000"), (None, "0000", "0100000000"),
    ]),
    (pa.struct([("x", pa.int16()), ("y", pa.string())]), [
        ({"x": 1, "y": "z"}, "01018001017a00", "000100010000007a"),
        ({"x": None, "y": None}, "010000000000", "06000000000000"), (None, "000000000000", "07000000000000"),
    ]),
    (pa.list_(pa.int8()), [
        ([1, None], "01010101020102010100", "000400000000010100"), ([], "0100", "0000000000"),
        (None, "0000", "0100000000"),
    ]),
    (pa.list_(pa.string()), [
        (["ab", None, ""],
         ("010701010101010105010101010101050101010101010001010201010101010161"
          "62010201010101010101010101010101010101010100"),
         "000c000000110000000700000005000000050000000002000000616201000000000000000000"),
        ([], "010000", "000000000000000000"), (None, "000000", "010000000000000000"),
    ]),
    (pa.map_(pa.string(), pa.int8()), [
        ([("k", 7)], "01070101010101010001010701020101010101016b00", "000400000007000000070000000007010000006b"),
        ([], "010000", "000000000000000000"), (None, "000000", "010000000000000000"),
    ]),
    (pa.null(), [(None, "00", "01")]),
]  # fmt: skip


@pytest.mark.parametrize(("t", "cases"), GOLDEN, ids=lambda v: str(v)[:20])
def test_stored_bytes_are_what_the_format_says(t: pa.DataType, cases: list[tuple[Any, str, str]]) -> None:
    """These bytes are in databases that exist: a codec that writes or reads others loses state."""
    values, keys, rows = (list(of_all) for of_all in zip(*cases, strict=True))
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
        *((pa.string(), row) for row in ("00 000000", "00 02000000 61", "00 00000000 61")),
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
    with pytest.raises(CorruptionError, match="a map has a null key"):
        decode_values(binaries([bytes(row)]), schema)
