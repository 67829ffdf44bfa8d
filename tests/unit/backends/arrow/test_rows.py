"""Row-wise questions about Arrow columns: order, equality and types of keys, and rows in Python."""

from __future__ import annotations

import datetime as dt
import math
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.arrow import rows as arrow_rows
from holdfast.backends.arrow.rows import order_rows
from holdfast.backends.arrow.values import python_rows
from holdfast.backends.run import Keys
from holdfast.spark_integration.keyed.slabs import KeyOrder
from holdfast.testing.state_rows import TYPES, plain

INNER = pa.struct([("f", pa.float64()), ("l", pa.list_(pa.float32()))])
NESTED = pa.struct([("a", INNER), ("b", pa.string())])
floats = st.sampled_from([0.0, -0.0, 1.5, math.inf, math.nan, -math.nan, None])
nested = st.none() | st.fixed_dictionaries(
    {
        "a": st.none() | st.fixed_dictionaries({"f": floats, "l": st.none() | st.lists(floats, max_size=3)}),
        "b": st.sampled_from([None, "", "x"]),
    }
)


def batch(rows: list[tuple[Any, ...]], *types: pa.DataType) -> pa.RecordBatch:
    columns = [
        arrow_rows.normalize_keys(pa.array([row[i] for row in rows], arrow_rows.storage_type(t)))
        for i, t in enumerate(types)
    ]
    return pa.RecordBatch.from_arrays(columns, names=[str(i) for i in range(len(types))])


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.list_(pa.string()), pa.map_(pa.string(), pa.int64())])
def test_chunks_that_are_too_large_for_small_offsets_are_one_of_a_large_type(
    kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a shard that wait in a file come in chunks, and may have more than 2 GiB of text, which Arrow refuses."""
    value: Any = {pa.string(): "abc", pa.binary(): b"abc"}.get(kind, [("abc", 1)] if pa.types.is_map(kind) else ["abc"])
    column = pa.chunked_array([pa.array([value, None], kind), pa.array([value], kind)])
    for most, expected in ((column.nbytes, kind), (column.nbytes - 1, arrow_rows.storage_type(kind))):
        monkeypatch.setattr(arrow_rows, "SMALL_OFFSETS_MAX", most)
        one = arrow_rows.one_chunk(column)
        assert one.type == expected
        assert one.to_pylist() == [value, None, value]
    assert arrow_rows.one_chunk(column.slice(0, 2)).type == kind, "a single chunk is never copied"


@pytest.mark.slow(0.5)
@given(st.lists(st.tuples(nested, floats, nested), min_size=1, max_size=20), st.data())
def test_equality_of_nested_keys_is_that_of_python(rows: list[Any], data: st.DataObject) -> None:
    """Null equals null, NaN NaN and -0.0 0.0 at any depth; nothing else does; slices too."""
    others = [data.draw(st.sampled_from(rows)) for _ in rows]
    left, right = (batch(r, NESTED, pa.float32(), pa.list_(NESTED)) for r in (nest(rows), nest(others)))
    expected = [plain(a) == plain(b) for a, b in zip(rows, others, strict=True)]
    assert arrow_rows.rows_equal(left, right).tolist() == expected
    start = data.draw(st.integers(0, len(rows) - 1))
    assert arrow_rows.rows_equal(left.slice(start), right.slice(start)).tolist() == expected[start:]


def nest(rows: list[Any]) -> list[Any]:
    return [(first, number, None if last is None else [last, None]) for first, number, last in rows]


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("data_type", [pa.int64(), pa.string(), pa.float64()])
@given(st.lists(st.tuples(st.integers(0, 1), st.none() | st.integers(0, 5)), max_size=20))
def test_keys_of_one_column_ascend_where_they_share_a_hash(
    data_type: pa.DataType, is_sorted: bool, rows: list[tuple[int, int | None]]
) -> None:
    """Rows that come in order are not sorted again, and it makes no difference; nulls come last."""
    in_order = sorted(rows, key=lambda row: (row[0], row[1] is None, row[1]))
    given_rows = in_order if is_sorted else rows
    keys = batch([(None if key is None else str(key),) for _, key in given_rows], pa.string())
    keys = pa.RecordBatch.from_arrays([keys.column(0).cast(arrow_rows.storage_type(data_type))], names=["0"])
    order = arrow_rows.order_rows(np.array([row[0] for row in given_rows], np.uint64), keys)
    assert [given_rows[i] for i in order.rows] == in_order
    assert order.first.tolist() == [i == 0 or in_order[i] != in_order[i - 1] for i in range(len(in_order))]


@given(st.lists(st.tuples(st.integers(0, 2), nested, floats), max_size=30))
def test_order_groups_equal_keys_in_order_of_arrival(rows: list[Any]) -> None:
    """Hashes ascend, each key stands together, its rows as they came: what "last wins" rests on."""
    keys = batch([row[1:] for row in rows], NESTED, pa.float64())
    order = arrow_rows.order_rows(np.array([row[0] for row in rows], np.uint64), keys)
    groups: list[list[int]] = []
    for place, row in enumerate(order.rows.tolist()):
        if order.first[place]:
            groups.append([])
        groups[-1].append(row)
    expected: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        expected.setdefault(plain(row), []).append(i)
    assert sorted(groups) == sorted(expected.values())
    assert [rows[i][0] for i in order.rows] == sorted(row[0] for row in rows)


@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 5000])
@pytest.mark.parametrize("bits", [3, 8, 12, 55, 64])
@pytest.mark.parametrize("shift", [0, 52])
def test_hashes_ascend_whichever_bits_they_differ_in(rows: int, bits: int, shift: int) -> None:
    """What is sorted has a row's number where a hash has its low bits: those that differ only there are told apart."""
    chance = np.random.default_rng(rows * bits)
    few = chance.integers(0, 1 << min(bits, 64 - shift), max(1, rows // 3), dtype=np.uint64, endpoint=False)
    given_hashes = (chance.choice(few, rows) << np.uint64(shift)) | np.uint64(1 << 20)
    numbers = pa.RecordBatch.from_arrays([pa.array(given_hashes)], ["key"])
    order = order_rows(given_hashes, numbers)
    assert order.rows.tolist() == sorted(range(rows), key=given_hashes.tolist().__getitem__)
    assert order.first.sum() == len(np.unique(given_hashes))


@pytest.mark.parametrize("different", [0, 1, 40, 99])
def test_keys_that_share_a_hash_are_told_apart_however_many_rows_repeat_one(different: int) -> None:
    """Neighbours are compared all together where most of them repeat a key, and otherwise one by one."""
    keys = pa.array([f"key {n}" for n in range(different)] + ["same"] * (100 - different))
    order = order_rows(np.full(100, 7, np.uint64), pa.RecordBatch.from_arrays([keys], ["key"]))
    assert order.first.sum() == different + 1
    assert sorted(keys.take(pa.array(order.rows[order.first])).to_pylist()) == sorted(set(keys.to_pylist()))


@pytest.mark.parametrize("case", TYPES, ids=lambda case: str(case[0])[:40])
def test_order_among_keys_of_one_hash_for_every_type(case: tuple[pa.DataType, Any, Any]) -> None:
    """Interleaved different keys of one hash come together."""
    kind, one, other = case
    values = [one, other, None, one, None, other, one]
    keys = batch([(v,) for v in values], kind)
    order = arrow_rows.order_rows(np.zeros(7, np.uint64), keys)
    assert order.first.sum() == 3
    groups = np.split(order.rows, np.flatnonzero(order.first)[1:])
    assert sorted(g.tolist() for g in groups) == [[0, 3, 6], [1, 5], [2, 4]]


@pytest.mark.parametrize("nest", ["struct", "list"])
def test_order_among_nested_keys_of_one_hash_with_times_that_python_has_not(nest: str) -> None:
    """Spark's years go from -290308 to 294247, those of Python from 1 to 9999."""
    times = pa.array([2**62, 2**61, 2**62], pa.int64()).view(pa.timestamp("us", "UTC"))
    dates = pa.array([2**31 - 1, 5, 2**31 - 1], pa.int32()).view(pa.date32())
    keys = pa.StructArray.from_arrays([times, dates], ["time", "date"])
    if nest == "list":
        keys = pa.LargeListArray.from_arrays(pa.array(range(4), pa.int64()), keys)
    order = order_rows(np.ones(3, np.uint64), pa.RecordBatch.from_arrays([keys], ["key"]))
    assert order.first.sum() == 2
    assert [0, 2] in (order.rows[:2].tolist(), order.rows[1:].tolist())
    assert (
        len(KeyOrder.of(Keys(np.arange(3, dtype=np.uint64), pa.RecordBatch.from_arrays([keys], ["key"]))).starts) == 3
    )


def test_all_nan_and_zeros_become_one_bit_pattern() -> None:
    """Normalised keys are equal byte by byte, so other readers group them alike."""
    odd = struct.unpack("<2d", struct.pack("<QQ", 0xFFF8000000000001, 0x7FF0000000000001))
    for kind in (pa.float32(), pa.float64()):
        column = arrow_rows.normalize_keys(pa.array([-0.0, 0.0, *odd, math.nan, None, 1.0], kind))
        raw = column.fill_null(7.0).to_numpy().view(np.uint32 if kind == pa.float32() else np.uint64).tolist()
        assert len(set(raw[:2])) == len(set(raw[2:5])) == 1
        assert column.null_count == 1
    nested_lists = pa.array([[[-0.0], None], None, [], [[None, math.nan]]], pa.large_list(pa.large_list(pa.float64())))
    result = arrow_rows.normalize_keys(nested_lists.slice(1))
    result.validate(full=True)
    assert plain(result.to_pylist()) == (None, (), ((None, "NaN"),))


def test_batches_without_columns_keep_their_rows() -> None:
    """A table may have keys only: its value side still has rows."""
    nothing = arrow_rows.from_columns([], pa.schema([]), 5)
    assert nothing.num_rows == 5
    assert arrow_rows.take(nothing, np.array([1, 2])).num_rows == 2
    assert arrow_rows.take(nothing, pa.array([None, 1])).num_rows == 2
    assert arrow_rows.filter_rows(nothing, np.array([True, False, True, False, True])).num_rows == 3


@pytest.mark.parametrize(
    ("given_type", "stored", "fits"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.int64(), pa.float64(), True),
        (pa.string(), pa.large_string(), True),
        (pa.dictionary(pa.int8(), pa.string()), pa.large_string(), True),
        (pa.null(), pa.large_list(pa.int64()), True),
        (pa.timestamp("ns", "Europe/Berlin"), pa.timestamp("us", "UTC"), True),
        (pa.list_(pa.int8()), pa.large_list(pa.int64()), True),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int64())]), True),
        (pa.string(), pa.int64(), False),
        (pa.int64(), pa.large_string(), False),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), False),
        (pa.timestamp("us", "UTC"), pa.timestamp("us"), False),
        (pa.timestamp("us"), pa.date32(), False),
        (pa.bool_(), pa.int64(), False),
        (pa.binary(), pa.large_string(), False),
        (pa.struct([("a", pa.int8()), ("b", pa.int8())]), pa.struct([("a", pa.int8())]), False),
        (pa.struct([("a", pa.int8()), ("b", pa.int8())]), pa.struct([("b", pa.int8()), ("a", pa.int8())]), False),
        (pa.list_(pa.string()), pa.large_list(pa.int64()), False),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.large_string(), pa.int64()), True),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.int64(), pa.int64()), False),
        (pa.decimal128(5, 2), pa.decimal128(10, 2), True),
    ],
)
def test_a_cast_never_changes_the_meaning(given_type: pa.DataType, stored: pa.DataType, fits: bool) -> None:
    """A function that returns text for a number is told so, whether or not the text happens to parse."""
    assert arrow_rows.is_same_kind(given_type, stored) is fits


def test_storage_types_are_large_and_stay_as_they_are() -> None:
    """Converting twice is converting once, at any depth."""
    kind = pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.binary()))), ("t", pa.timestamp("us", "Asia/Tokyo"))])
    stored = arrow_rows.storage_type(kind)
    assert arrow_rows.storage_type(stored) == stored
    assert stored.field("m").type.key_type == pa.large_string()
    assert stored.field("m").type.item_type == pa.large_list(pa.large_binary())
    assert stored.field("t").type == pa.timestamp("us", "UTC")
    assert arrow_rows.storage_type(pa.decimal128(38, 18)) == pa.decimal128(38, 18)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("hashes", [1, 3])
def test_keys_of_several_columns_that_share_a_hash(is_sorted: bool, hashes: int) -> None:
    """As rows of an index by time do: in order already or not, some keys twice, null last."""
    rows = [(h, n, t) for h in range(hashes) for n in [*range(-3, 4), None, 2] for t in (5, 5)]
    ascending = sorted(rows, key=lambda row: (row[0], row[1] is None, row[1] or 0, row[2]))
    given_rows = ascending if is_sorted else [rows[i * 7 % len(rows)] for i in range(len(rows))]
    h, n, t = zip(*given_rows, strict=True)
    keys = pa.RecordBatch.from_arrays([pa.array(n), pa.array(t).cast(pa.timestamp("us", "UTC"))], ["n", "t"])
    order = order_rows(np.array(h, np.uint64), keys)
    assert [given_rows[i] for i in order.rows] == sorted(
        given_rows, key=lambda row: (row[0], row[1] is None, row[1] or 0, row[2])
    )
    firsts = [i == 0 or ascending[i] != ascending[i - 1] for i in range(len(rows))]
    assert order.first.tolist() == firsts
    if is_sorted:
        assert order.rows.tolist() == [*range(len(rows))]


TEXT = pa.array([b"\xffa", b"b", None], pa.large_binary()).view(pa.large_string())
FAR = pa.array([2**62, 0, None], pa.int64()).cast(pa.timestamp("us", "UTC"))
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
FAR_TEXT = f"{2**62} timestamp[us, tz=UTC]"


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array([1, 2, None]), [1, 2, None]),
        (TEXT, ["\\xffa", "b", None]),
        (FAR, [FAR_TEXT, EPOCH, None]),
        (pa.array([2**30, 0, None], pa.int32()).view(pa.date32()), [f"{2**30} date32[day]", dt.date(1970, 1, 1), None]),
        (
            pa.StructArray.from_arrays([TEXT, FAR], ["s", "t"]),
            [{"s": "\\xffa", "t": FAR_TEXT}, {"s": "b", "t": EPOCH}, {"s": None, "t": None}],
        ),
        (pa.LargeListArray.from_arrays(pa.array([0, 2, 3, 3]), TEXT), [["\\xffa", "b"], [None], []]),
        (
            pa.MapArray.from_arrays(pa.array([0, 2, 2, 2], pa.int32()), TEXT.slice(0, 2), FAR.slice(0, 2)),
            [[("\\xffa", FAR_TEXT), ("b", EPOCH)], [], []],
        ),
    ],
    ids=["number", "text", "time", "date", "struct", "list", "map"],
)
def test_each_row_can_be_shown(column: pa.Array, values: list[Any]) -> None:
    """Spark stores all of these; what stands beside them is as it would be without them."""
    rows = pa.table({"c": column, "n": [1, 2, 3]})
    assert python_rows(rows) == [{"c": value, "n": n} for value, n in zip(values, (1, 2, 3), strict=True)]
    assert python_rows(rows.combine_chunks().to_batches()[0]) == python_rows(rows)


def test_no_rows_and_no_columns() -> None:
    assert python_rows(pa.table({"a": pa.array([], pa.string())})) == []
    assert python_rows(pa.table({})) == []
