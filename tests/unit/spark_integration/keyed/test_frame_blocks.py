"""Small frames cut and read by pandas' private blocks, and by its public methods where a name of the former is gone."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd
import pytest

from holdfast.spark_integration.keyed import frame_blocks
from holdfast.spark_integration.keyed.frame_blocks import blocks_of, consecutive, joined_columns, lacking


@pytest.fixture(params=["private", "columns", "public"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "public":
        monkeypatch.setattr(frame_blocks, "_has_blocks", lambda: False)
    if request.param == "columns":
        monkeypatch.setattr(frame_blocks, "give_columns", frame_blocks.our_columns)
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
    """The test above can fail: of the frame, and of its blocks."""
    monkeypatch.setattr(frame_blocks, "PRIVATE_OF_BLOCKS", ("values", "mgr_locs.gone"))
    assert lacking() == ["mgr_locs.gone"]
    monkeypatch.setattr(frame_blocks, "PRIVATE", ("_mgr.blocks", "_mgr.gone"))
    assert lacking() == ["_mgr.gone"]
    monkeypatch.setattr(frame_blocks, "PRIVATE_OF_PANDAS", ("Index.gone",))
    monkeypatch.setattr(frame_blocks, "CONSTRUCTORS", ("dict_to_mgr", "moved"))
    assert lacking() == ["Index.gone", "core.frame.moved", "_mgr.gone"]


@pytest.mark.parametrize(
    "name", [*frame_blocks.PRIVATE_OF_PANDAS, *(f"core.frame.{name}" for name in frame_blocks.CONSTRUCTORS)]
)
def test_each_private_name_of_pandas_is_there(name: str) -> None:
    """By name: which one a new version of pandas has no longer."""
    assert attrgetter(name)(pd) is not None


@pytest.mark.parametrize("name", frame_blocks.PRIVATE)
def test_each_private_name_of_a_frame_is_there(name: str) -> None:
    attrgetter(name)(pd.DataFrame({"n": [0]}))  # raises AttributeError


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
    """Rows without columns are output too: of nulls."""
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
