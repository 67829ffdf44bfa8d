"""Frames for each key, against what Spark's own conversion makes of each key's rows alone."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.keyed import frame_blocks
from holdfast.spark_integration.keyed import slabs as keyed_slabs
from holdfast.spark_integration.keyed.frame_blocks import blocks_of, consecutive, joined_columns, lacking
from holdfast.spark_integration.keyed.frames import FrameFormat, KeyFrames, key_tuples

ZONE = "America/New_York"  # Not that of the process.
FORMATS = [FrameFormat(ZONE), FrameFormat(ZONE, prefer_int_ext_dtype=True)]
MADE_ANEW = [replace(fmt, from_python=True) for fmt in FORMATS]
ALL_ROWS = 10**6
few = settings(max_examples=settings().max_examples // 3)  # For each of twenty types, or with all of them.
WALL_CLOCK = st.integers(-(2**51), 2**52).map(
    lambda us: (dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(0, 0, us)).replace(tzinfo=None)
)
INSTANTS = WALL_CLOCK.map(lambda value: value.replace(tzinfo=dt.UTC))

#: Values of every type that Spark hands to Python, in the types in which they are stored: instants in UTC.
VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "byte": (pa.int8(), st.integers(-128, 127)),
    "short": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "long": (pa.int64(), st.one_of(st.integers(-3, 3), st.integers(2**53, 2**63 - 1))),
    "float": (pa.float32(), st.floats(width=32)),
    "double": (pa.float64(), st.floats()),
    "boolean": (pa.bool_(), st.booleans()),
    "string": (pa.string(), st.text(max_size=3)),
    "large string": (pa.large_string(), st.text(max_size=3)),
    "binary": (pa.binary(), st.binary(max_size=3)),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us", "UTC"), INSTANTS),
    "timestamp_ntz": (pa.timestamp("us"), WALL_CLOCK),
    "interval": (pa.duration("us"), st.timedeltas(dt.timedelta(-1000), dt.timedelta(1000))),
    "decimal": (pa.decimal128(38, 2), st.decimals(-(10**30), 10**30, places=2)),
    "null": (pa.null(), st.none()),
    "ints": (pa.list_(pa.int64()), st.lists(st.one_of(st.none(), st.integers(2**53, 2**60)), max_size=3)),
    "flags": (pa.list_(pa.list_(pa.bool_())), st.lists(st.lists(st.one_of(st.none(), st.booleans()), max_size=2))),
    "instants": (pa.list_(pa.timestamp("us", "UTC")), st.lists(st.one_of(st.none(), INSTANTS), max_size=2)),
    "struct": (
        pa.struct([("n", pa.int32()), ("s", pa.string()), ("t", pa.timestamp("us", "UTC"))]),
        st.fixed_dictionaries(
            {
                "n": st.one_of(st.none(), st.integers(0, 3)),
                "s": st.one_of(st.none(), st.text(max_size=2)),
                "t": st.one_of(st.none(), INSTANTS),
            }
        ),
    ),
    "map": (
        pa.map_(pa.string(), pa.int64()),
        st.dictionaries(st.text(max_size=2), st.one_of(st.none(), st.integers()), max_size=2).map(
            lambda entries: [(k, None if v is None else v % 2**62) for k, v in entries.items()]
        ),
    ),
}


def as_spark_sends(data_type: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(data_type) and data_type.tz:
        return pa.timestamp("us", ZONE)
    if pa.types.is_list(data_type):
        return pa.list_(as_spark_sends(data_type.value_type))
    if pa.types.is_struct(data_type):
        return pa.struct([f.with_type(as_spark_sends(f.type)) for f in data_type])
    return data_type


def spark_frame(names: list[str], columns: list[pa.Array], frame_format: FrameFormat) -> pd.DataFrame:
    batch = pa.RecordBatch.from_arrays(columns, names=names)
    series = spark_versions.arrow_to_pandas(batch, ZONE, prefer_int_ext_dtype=frame_format.prefer_int_ext_dtype)
    for i, (one, column) in enumerate(zip(series, columns, strict=True)):
        if str(one.dtype) == "Int64":  # Spark's own loses digits beyond 2**53 beside some nulls, beside others not.
            series[i] = pd.Series(pd.array(column.to_pylist(), "Int64"), name=one.name)
    frame = pd.concat(series, axis=1)
    if frame_format.from_python:
        anew = pd.DataFrame(list(frame.itertuples(index=False)))
        return anew.set_axis(names, axis="columns")
    return frame


def same(left: Any, right: Any) -> bool:
    """Whether two values are the same, type and all, in whatever they are nested."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and same(left.tolist(), right.tolist())
    if isinstance(left, dict):
        return list(left) == list(right) and same(list(left.values()), list(right.values()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return left is right or left == right or (left != left and right != right)


def assert_same_frames(ours: pd.DataFrame, sparks: pd.DataFrame) -> None:
    assert list(ours.columns) == list(sparks.columns)
    assert [str(t) for t in ours.dtypes] == [str(t) for t in sparks.dtypes]
    assert ours.index.equals(sparks.index)
    assert type(ours.index) is type(sparks.index)
    for i in range(len(ours.columns)):
        assert same(ours.iloc[:, i].tolist(), sparks.iloc[:, i].tolist()), ours.columns[i]


@st.composite
def key_rows(draw: st.DrawFn, names: list[str]) -> tuple[list[int], list[list[Any]]]:
    """Return the number of rows of each key, and the columns; nulls are frequent in some keys only."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    columns = []
    for name in names:
        values = VALUES[name][1]
        column: list[Any] = []
        for size in sizes:
            some = st.one_of(st.none(), values) if draw(st.booleans()) else values
            column += draw(st.lists(some, min_size=size, max_size=size))
        columns.append(column)
    return sizes, columns


def check(names: list[str], sizes: list[int], columns: list[list[Any]], fmt: FrameFormat, rows_each: int) -> None:
    """Compare all frames, with the rows arriving in reverse."""
    rows = sum(sizes)
    order = np.arange(rows)[::-1].astype(np.int64)
    stored = [pa.array(c, VALUES[n][0]) for n, c in zip(names, columns, strict=True)]
    labels = [f"c{i // 2}" for i in range(len(names))]  # Every label twice: Spark has frames with duplicate names.
    table = pa.Table.from_arrays([a.take(pa.array(order)) for a in stored], names=labels)
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
    ours = [list(chunks) for slab in KeyFrames(table, order, starts, fmt, rows_each).slabs() for chunks in slab]
    assert len(ours) == len(sizes)
    for start, size, chunks in zip(starts.tolist(), sizes, ours, strict=True):
        begins = list(range(start, start + size, rows_each))
        assert len(chunks) == len(begins)
        for begin, chunk in zip(begins, chunks, strict=True):
            part = slice(begin, min(begin + rows_each, start + size))
            alone = [pa.array(c[part], as_spark_sends(a.type)) for c, a in zip(columns, stored, strict=True)]
            assert_same_frames(chunk, spark_frame(labels, alone, fmt))


@pytest.mark.parametrize("name", VALUES)
def test_every_key_sees_the_frame_it_would_see_alone(name: str) -> None:
    """Each type by itself, next to an integer that decides over conversions too."""

    @few
    @given(key_rows([name, "long"]), st.sampled_from(FORMATS + MADE_ANEW))
    def run(made: tuple[list[int], list[list[Any]]], fmt: FrameFormat) -> None:
        check([name, "long"], *made, fmt, ALL_ROWS)

    run()


@pytest.mark.slow(1)
@few
@given(key_rows(list(VALUES)), st.integers(1, 3), st.sampled_from([FORMATS[0], MADE_ANEW[0]]))
def test_all_types_in_chunks(made: tuple[list[int], list[list[Any]]], rows_each: int, fmt: FrameFormat) -> None:
    """A key with more rows than a chunk has several, each converted by itself as Spark does."""
    check(list(VALUES), *made, fmt, rows_each)


@pytest.mark.parametrize("name", VALUES)
def test_keys_are_the_first_values_of_their_series(name: str) -> None:
    """A key holds numpy's and pandas' scalars, and NaN, NaT or None for null, as Spark's ``series[0]``."""

    @few
    @given(st.lists(st.one_of(st.none(), VALUES[name][1]), min_size=1, max_size=5), st.sampled_from(FORMATS))
    def run(values: list[Any], fmt: FrameFormat) -> None:
        stored = VALUES[name][0]
        ours = key_tuples(pa.table({"k": pa.array(values, stored), "again": pa.array(values, stored)}), fmt)
        for value, key in zip(values, ours, strict=True):
            alone = spark_frame(["k"], [pa.array([value], as_spark_sends(stored))], fmt)["k"][0]
            assert same(key, (alone, alone)), (key, alone)

    run()


def frames_of(rows_each: int = 10, **columns: Any) -> tuple[KeyFrames, int]:
    table = pa.table(columns)
    rows = np.arange(len(table))
    return KeyFrames(table, rows, rows, FORMATS[0], rows_each), len(table)


def test_a_function_may_name_index_and_labels() -> None:
    frames, _ = frames_of(k=["a", "b", "c"], v=[1.5, None, 3.5])
    seen = []
    for slab in frames.slabs():
        for [frame] in slab:
            seen.append((frame.index.name, frame.columns.name))
            frame.index.name, frame.columns.name = "row", "column"
    for empty in frames.empty(3):
        seen.append((empty.index.name, empty.columns.name))
        empty.index.name, empty.columns.name = "row", "column"
    assert seen == [(None, None)] * 6


def test_the_frame_of_a_key_that_timed_out() -> None:
    frames, _ = frames_of(k=["a"], v=[1])
    sparks = pd.DataFrame(columns=spark_frame(["k", "v"], [pa.array(["a"]), pa.array([1])], FORMATS[0]).columns)
    for empty in frames.empty(2):
        pd.testing.assert_frame_equal(empty, sparks)
        empty["new"] = 1


def test_slabs_are_bounded_by_keys_and_rows_and_hold_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: no slab is larger than asked, but for one key, and a large key stands alone."""
    monkeypatch.setattr(keyed_slabs, "SLAB_KEYS", 3)
    monkeypatch.setattr(keyed_slabs, "SLAB_ROWS", 4)
    sizes = np.array([1, 1, 1, 1, 3, 2, 9, 1, 1, 5, 4])
    rows = np.arange(sizes.sum())
    frames = KeyFrames(pa.table({"v": rows}), rows, np.cumsum(sizes) - sizes, FORMATS[0], 4)
    slabs = list(frames.slabs())
    assert [(slab.first_key, slab.keys) for slab in slabs] == [
        (0, 3), (3, 2), (5, 1), (6, 1), (7, 2), (9, 1), (10, 1)
    ]  # fmt: skip
    assert [[[len(f) for f in chunks] for chunks in slab] for slab in slabs] == [
        [[1], [1], [1]], [[1], [3]], [[2]], [[4, 4, 1]], [[1], [1]], [[4, 1]], [[4]]
    ]  # fmt: skip


@pytest.mark.slow(0.5)
def test_slabs_of_wide_rows_have_few() -> None:
    """Memory is bounded by bytes too: eight rows of some MiB are not one slab."""
    rows = np.arange(8)
    wide = pa.table({"k": rows, "text": [str(i) * (10 << 20) for i in rows]})
    frames = KeyFrames(wide, rows, rows, FORMATS[0], 100)
    assert [slab.keys for slab in frames.slabs()] == [3, 3, 2]


def test_no_rows_no_slabs() -> None:
    nothing = np.array([], np.int64)
    assert not list(KeyFrames(pa.table({"v": pa.array([], pa.int64())}), nothing, nothing, FORMATS[0], 4).slabs())
    assert key_tuples(pa.table({"k": pa.array([], pa.int64())}), FORMATS[0]) == []


def test_a_large_key_is_converted_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that looks at the first chunk only costs no more than that chunk."""
    made: list[int] = []
    convert = FrameFormat.to_frame

    def counted(self: FrameFormat, rows: pa.Table) -> pd.DataFrame:
        made.append(len(rows))
        return convert(self, rows)

    monkeypatch.setattr(FrameFormat, "to_frame", counted)
    rows = np.arange(1000)
    [slab] = KeyFrames(pa.table({"v": rows}), rows, np.array([0]), FORMATS[0], 10).slabs()
    [chunks] = slab
    assert len(next(chunks)) == 10
    assert made == [10]


def test_a_key_with_wide_rows_is_converted_chunk_by_chunk() -> None:
    """Ten thousand rows, Spark's limit for a chunk, may be more than a worker can hold."""
    rows = np.arange(8)
    wide = pa.table({"k": np.zeros(8), "text": [str(i) * (10 << 20) for i in rows]})
    [slab] = KeyFrames(wide, rows, np.array([0]), FORMATS[0], 10_000).slabs()
    [chunks] = slab
    assert [[text[0] for text in chunk["text"]] for chunk in chunks] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"]]


def test_decimal_keys_keep_their_scale() -> None:
    keys = pa.table({"k": pa.array([Decimal("1.50")], pa.decimal128(5, 2))})
    assert str(key_tuples(keys, FORMATS[0])[0][0]) == "1.50"


def nested(text: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([pa.array([1, 2]), text], ["n", "t"])


@pytest.mark.parametrize("wrap", [lambda text: text, nested], ids=["plain", "nested"])
def test_text_that_is_not_utf8_is_an_error_that_names_the_column(wrap: Any) -> None:
    """Spark's worker fails too, with UnicodeDecodeError or Arrow's "Wrapping … failed", which name nothing."""
    text = wrap(pa.array([b"fine", b"\xff\xfe"]).view(pa.string()))
    rows = pa.table({"v": [1, 2], "raw": text})
    for shown in (lambda: FORMATS[0].to_frame(rows), lambda: key_tuples(rows, FORMATS[0])):
        with pytest.raises(InvalidArgumentError, match=r"column 'raw' of the input has text .*make_valid_utf8"):
            shown()


@pytest.fixture(params=["private", "columns", "public"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "public":
        monkeypatch.setattr(frame_blocks, "_has_blocks", lambda: False)
    if request.param == "columns":
        monkeypatch.setattr(frame_blocks, "column_cache", frame_blocks.lazy_columns)
    return request.param


def of_all_kinds(rows: int) -> pd.DataFrame:
    """Columns of every kind of block, with two of one dtype that do not stand side by side."""
    at = np.arange(rows)
    times = pd.Series(pd.to_datetime(at * 10**9))
    return pd.DataFrame(
        {
            "n": at,
            "z": times.dt.tz_localize("Asia/Tokyo"),
            "f": np.where(at % 2, np.nan, at / 2),
            "text": [None if i % 3 == 0 else str(i) for i in at],
            "m": -at,
            "t": times,
            "y": times.dt.tz_localize("Asia/Tokyo") + pd.Timedelta(days=1),
            "d": pd.Series(pd.to_timedelta(at, unit="s")),
            "p": times.dt.to_period("D"),
            "i": pd.array([None if i % 2 else i for i in at], "Int64"),
            "c": pd.Categorical([str(i % 2) for i in at], categories=["0", "1"]),
            "a": pd.array([str(i) for i in at], "string[pyarrow]"),
        }
    )


def test_pandas_has_the_private_names_that_make_small_frames_cheap() -> None:
    """Without them all goes on, but 20 µs a key slower: so their end must be noticed here."""
    assert lacking() == []


def test_a_name_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_blocks, "PRIVATE_OF_BLOCKS", ("values", "mgr_locs.gone"))
    assert lacking() == ["mgr_locs.gone"]
    monkeypatch.setattr(frame_blocks, "PRIVATE", ("_mgr.blocks", "_mgr.gone"))
    assert lacking() == ["_mgr.gone"]
    monkeypatch.setattr(frame_blocks, "PRIVATE_OF_PANDAS", ("Index.gone",))
    monkeypatch.setattr(frame_blocks, "CONSTRUCTORS", ("dict_to_mgr", "moved"))
    assert lacking() == ["Index.gone", "core.frame.moved", "_mgr.gone"]


def test_frames_are_cut_at_the_same_rows_with_all_they_hold(way: str) -> None:
    """Each part equals the rows that pandas' own slice has, down to dtypes, index and labels."""
    frame = of_all_kinds(6)
    for part, (start, end) in zip(consecutive(frame, np.array([1, 3, 2])), [(0, 1), (1, 4), (4, 6)], strict=True):
        pd.testing.assert_frame_equal(part, frame.iloc[start:end].reset_index(drop=True))
        assert type(part.index) is pd.RangeIndex
        assert list(part["m"]) == [-i for i in range(start, end)]


def test_a_function_may_change_the_frame_it_gets(way: str) -> None:
    """What is done to one part is not seen in the next: columns, names and labels."""
    seen = []
    for part in consecutive(pd.DataFrame({"k": [1, 2, 3], "v": [10, 20, 30]}), np.array([1, 1, 1])):
        seen.append((list(part.columns), part["v"].tolist(), part.index.name, part.columns.name))
        part["new"] = 1
        part["v"] += 1
        part.index.name = part.columns.name = "named"
        part.columns = ["x", "y", "z"]
    assert seen == [(["k", "v"], [v], None, None) for v in (10, 20, 30)]


def test_a_frame_that_is_kept_keeps_its_names(way: str) -> None:
    """What is done to the labels of one frame, the next ones neither show nor undo; written in place they are found."""
    kept = []
    for part in consecutive(pd.DataFrame({"k": [1, 2, 3], "v": [10, 20, 30]}), np.array([1, 1, 1])):
        part.columns.name = f"named {len(kept)}"
        part.columns.values[0] = f"written {len(kept)}"
        assert part[f"written {len(kept)}"].tolist() == [len(kept) + 1]
        kept.append(part)
    assert [part.columns.tolist() for part in kept] == [[f"written {at}", "v"] for at in range(3)]
    assert [part.columns.name for part in kept] == [f"named {at}" for at in range(3)]


def test_columns_are_found_by_names_that_change_places(way: str) -> None:
    """A function that writes into the labels of its frame finds each column by what it wrote."""
    for part in consecutive(pd.DataFrame({"k": [1, 2, 3], "v": [10, 20, 30]}), np.array([1, 1, 1])):
        part.columns.values[:] = ["v", "k"]
        assert part["k"].tolist() == [10 * n for n in part["v"]]
        assert (part["k"].name, part["v"].name) == ("k", "v")


def test_names_written_into_one_frame_reach_no_other(way: str) -> None:
    """A function that writes for some keys only, and keeps their frames: those before and after have their names."""
    kept = []
    for at, part in enumerate(consecutive(pd.DataFrame({"k": range(5), "v": range(5)}), np.ones(5, np.int64))):
        if at == 2:
            part.columns.values[0] = "written"
        kept.append(part)
    assert [part.columns.tolist() for part in kept] == [["written" if at == 2 else "k", "v"] for at in range(5)]
    assert [part["k"].tolist() for part in kept if part is not kept[2]] == [[0], [1], [3], [4]]


def test_columns_are_joined_as_pandas_joins_frames(way: str) -> None:
    """Frames of one kind, block by block: all dtypes and values, in the columns' order."""
    whole = of_all_kinds(7)
    parts = [whole.iloc[:2].copy(), whole.iloc[2:3].copy(), whole.iloc[3:].copy()]
    kinds = {blocks_of(part)[0] for part in parts}
    assert len(kinds) == 1
    joined = joined_columns(kinds.pop(), [blocks_of(part)[1] for part in parts])
    for column, (name, expected) in zip(joined, whole.items(), strict=True):
        pd.testing.assert_series_equal(pd.Series(column, name=name), expected)


def test_frames_that_were_put_together_otherwise_are_told_apart() -> None:
    """The same dtypes in other blocks, or other columns in the blocks, must not be joined block by block."""
    at_once = pd.DataFrame({"a": [1], "b": [2], "c": [0.5]})
    one_by_one = pd.DataFrame({"a": [1]}).assign(b=2, c=0.5)
    in_another_order = at_once[["a", "c", "b"]]
    kinds = {blocks_of(frame)[0] for frame in (at_once, one_by_one, in_another_order)}
    assert len(kinds) == 3
    for frame in (at_once, one_by_one, in_another_order):
        places, blocks = blocks_of(frame)
        joined = joined_columns(places, [blocks, blocks])
        assert [list(column) for column in joined] == [2 * frame[name].tolist() for name in frame]


def test_frames_without_columns_have_no_blocks(way: str) -> None:
    assert blocks_of(pd.DataFrame(index=range(3))) == ((), [])
    assert joined_columns((), [[], []]) == []


@pytest.mark.filterwarnings("ignore:data_manager option is deprecated:FutureWarning")
def test_frames_without_blocks_are_cut_and_read_too() -> None:
    """An option of pandas 2 keeps each column by itself; a function may set it after the worker has seen blocks."""
    in_blocks = pd.DataFrame({"x": [1, 2]})
    with pd.option_context("mode.data_manager", "array"):
        alone = pd.DataFrame({"x": [1, 2]})
        parts = list(consecutive(alone, np.array([1, 1])))
    assert [(part["x"].tolist(), part.index.tolist()) for part in parts] == [([1], [0]), ([2], [0])]
    places, blocks = blocks_of(alone)
    assert [list(column) for column in joined_columns(places, [blocks, blocks])] == [[1, 2, 1, 2]]
    assert places != blocks_of(in_blocks)[0]
