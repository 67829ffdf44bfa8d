"""Joins on an embedded shard, beside the same in plain Python."""

from __future__ import annotations

import datetime as dt
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.backends.arrow import crowds
from holdfast.spark_integration import timers
from holdfast.spark_integration.operators import joins
from holdfast.spark_integration.operators.joins import AT, IS_LEFT, AsofJoin, Join, JoinSide, KeyedTimes, Near, Sides
from holdfast.spark_integration.operators.places import Places
from holdfast.spark_integration.processor.state.variable_tables import JOINED_LEFT, JOINED_RIGHT, LATEST_RIGHT
from holdfast.spark_integration.tables.entry_rows import Entries, EntryRows
from holdfast.spark_integration.timers import KeysAtOnce
from tests.unit.spark_integration.embedded_shard import FunctionShard, rows_read

TIME = pa.timestamp("us", "UTC")
KEY = pa.schema([("user", pa.string())])
OUTPUT = pa.schema([("user", pa.string()), ("at", TIME), ("v", pa.int64()), ("paid", TIME), ("w", pa.int64())])
WITHIN = 5  # ms
USERS = st.sampled_from([None, "ann", "bob", "cem"])
#: Micro-batches: rows of side, user, time in ms; and the watermark in ms.
JOINED = st.lists(
    st.tuples(
        st.lists(st.tuples(st.booleans(), USERS, st.none() | st.integers(1, 40)), max_size=12), st.integers(0, 40)
    ),
    min_size=1,
    max_size=6,
).map(lambda batches: [(rows, max(mark for _, mark in batches[: i + 1])) for i, (rows, _) in enumerate(batches)])
HOW = ["inner", "left", "right", "full"]


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over goes in several turns, few as the rows are; a key's rows come in several pieces, in any order."""
    monkeypatch.setattr(KeysAtOnce.__init__, "__defaults__", (3,))
    monkeypatch.setattr(joins, "_AT_ONCE", 5)
    monkeypatch.setattr(crowds, "CROWD_ROWS", 2)
    scan = EntryRows.scan

    def in_pieces(entries: EntryRows, *asked: Any) -> Iterator[Entries]:
        halves = [some.take(np.arange(n, len(some), 2)) for some in scan(entries, *asked) for n in range(2)]
        yield from filter(len, reversed(halves))

    monkeypatch.setattr(EntryRows, "scan", in_pieces)


def time_of(ms: int | None) -> dt.datetime | None:
    return None if ms is None else dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


def joined_table(rows: list[tuple[bool, str | None, int | None, int]]) -> pa.Table:
    """Return rows of side, user, time and value."""
    sides, users, times, values = zip(*rows, strict=True) if rows else ([], [], [], [])
    return pa.table(
        {
            "user": pa.array(users, pa.string()),
            IS_LEFT: pa.array(sides, pa.bool_()),
            AT: pa.array(map(time_of, times), TIME),
            "v": pa.array([v if left else None for left, v in zip(sides, values, strict=True)], pa.int64()),
            "w": pa.array([None if left else v for left, v in zip(sides, values, strict=True)], pa.int64()),
        }
    )


@contextmanager
def join(how: str) -> Iterator[FunctionShard]:
    v, w = (pa.schema([(name, pa.int64())]) for name in "vw")
    left = JoinSide(JOINED_LEFT, KEY, pa.field("at", TIME), v, records_matches=how in ("left", "full"))
    right = JoinSide(JOINED_RIGHT, KEY, pa.field("paid", TIME), w, records_matches=how in ("right", "full"))
    with tempfile.TemporaryDirectory() as folder:
        yield FunctionShard(Path(folder), Join(Sides(KEY, left, right, OUTPUT), WITHIN * 1000), ["user"])


class Model:
    """The same, row by row."""

    def __init__(self, how: str) -> None:
        self.alone = {True: how in ("left", "full"), False: how in ("right", "full")}
        self.waiting: list[tuple[bool, Any, Any, int]] = []
        self.met: set[int] = set()

    def run(self, rows: list[tuple[bool, Any, Any, int]], watermark: int) -> list[tuple[Any, ...]]:
        output = []
        for new in rows:
            for old in self.waiting:
                (_, user, at, v), (_, _, paid, w) = (new, old) if new[0] else (old, new)
                if new[0] != old[0] and None not in (at, paid, user) and new[1] == old[1] and abs(at - paid) <= WITHIN:
                    self.met |= {v, w}
                    output.append((user, time_of(at), v, time_of(paid), w))
            self.waiting.append(new)
        over = [row for row in self.waiting if row[2] is None or row[2] + WITHIN + 1 <= watermark]
        self.waiting = [row for row in self.waiting if row not in over]
        for left, user, at, v in over:
            if self.alone[left] and v not in self.met:
                output.append((user, *((time_of(at), v, None, None) if left else (None, None, time_of(at), v))))
        return output

    def stored(self) -> int:
        return sum(1 for left, user, *_ in self.waiting if user is not None or self.alone[left])


@pytest.mark.parametrize("how", HOW)
@given(batches=JOINED)
def test_rows_meet_all_that_are_near_and_go_once_none_can_come(batches: list[tuple[list[Any], int]], how: str) -> None:
    """Each pair comes once, a row that met none alone if it is shown; no row stays in state or index that is over."""
    model, numbers = Model(how), iter(range(1000))
    with join(how) as one:
        for rows, watermark in batches:
            numbered = [(*row, next(numbers)) for row in rows]
            found = [tuple(row.values()) for row in one.run(joined_table(numbered), watermark)]
            assert sorted(found, key=repr) == sorted(model.run(numbered, watermark), key=repr)
            stored = len(one.stored(JOINED_LEFT)) + len(one.stored(JOINED_RIGHT))
            assert stored == len(one.stored("timers_by_due")) == model.stored()


@contextmanager
def asof_join() -> Iterator[FunctionShard]:
    v, w = (pa.schema([(name, pa.int64())]) for name in "vw")
    at = pa.field("at", TIME)
    sides = Sides(
        KEY,
        JoinSide(JOINED_LEFT, KEY, at, v),
        JoinSide(LATEST_RIGHT, KEY, at, w, is_numbered=False),
        pa.schema([("user", pa.string()), at, ("v", pa.int64()), ("w", pa.int64())]),
    )
    with tempfile.TemporaryDirectory() as folder:
        yield FunctionShard(Path(folder), AsofJoin(sides, WITHIN * 1000), ["user"])


@given(batches=JOINED)
@example(batches=[([(False, "ann", at) for at in (6, 7, 8)] + [(True, "ann", at) for at in (6, 7, 8, 9)], 20)])
def test_a_row_gets_the_latest_one_at_or_before_it(batches: list[tuple[list[Any], int]]) -> None:
    """Once the watermark has reached it, of all rows that came until then; nothing stays that is over."""
    numbers = iter(range(1000))
    left: list[tuple[Any, ...]] = []
    right: dict[tuple[Any, ...], int] = {}
    with asof_join() as one:
        for rows, watermark in batches:
            numbered = [(*row, next(numbers)) for row in rows]
            left += [row[1:] for row in numbered if row[0]]
            right |= {(user, at): w for is_left, user, at, w in numbered if not is_left and None not in (user, at)}
            ready = [row for row in left if None in row[:2] or row[1] <= watermark]
            left = [row for row in left if row not in ready]
            expected = []
            for user, at, v in ready:
                near = [t for u, t in right if u == user and at is not None and at - WITHIN <= t <= at]
                expected.append((user, time_of(at), v, right[user, max(near)] if near else None))
            right = {(user, at): w for (user, at), w in right.items() if at + WITHIN > watermark}
            found = [tuple(row.values()) for row in one.run(joined_table(numbered), watermark)]
            assert sorted(found, key=repr) == sorted(expected, key=repr)
            assert len(one.stored(JOINED_LEFT)) == len(left)
            assert len(one.stored(LATEST_RIGHT)) == len(right)
            assert len(one.stored("timers_by_due")) == len(left) + len(right)


@pytest.mark.parametrize("made", [lambda: join("left"), asof_join], ids=["join", "as-of join"])
def test_a_key_with_very_many_rows_costs_as_its_near_ones(
    made: Callable[[], AbstractContextManager[FunctionShard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few new rows read those near them, also if one of them is hours late; what is over is found by its key."""
    read = rows_read(monkeypatch)
    with made() as one:
        for left in (False, True):
            one.run(joined_table([(left, "ann", 100 * i, i) for i in range(5_000)]), 0)
        read.clear()
        rows = [(left, "ann", at, at) for left in (True, False) for at in (900, 400_002)]
        found = one.run(joined_table(rows), 1_001)
        assert {row["at"] for row in found} >= {time_of(900)}
        assert len(found) < 20
        assert 0 < sum(read) < 200


def test_wide_rows_with_one_match_come_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 400 rows gets the same 10 KB: no worker holds these 400 times."""
    monkeypatch.setattr(joins, "_AT_ONCE", 100)
    monkeypatch.setattr(timers, "AT_ONCE_BYTES", 100_000)
    at, wide = pa.field("at", TIME), pa.schema([("w", pa.string())])
    sides = Sides(
        KEY,
        JoinSide(JOINED_LEFT, KEY, at, pa.schema([("v", pa.int64())])),
        JoinSide(LATEST_RIGHT, KEY, at, wide, is_numbered=False),
        pa.schema([("user", pa.string()), at, ("v", pa.int64()), *wide]),
    )
    rows = joined_table([(True, "ann", 9, n) for n in range(400)] + [(False, "ann", 7, 0)])
    rows = rows.set_column(rows.column_names.index("w"), "w", pa.array([None] * 400 + ["x" * 10_000]))
    sizes: list[int] = []
    matched: list[int] = []
    shown, latest = Sides.shown, AsofJoin._latest

    def watched(*given: Any) -> pa.RecordBatch:
        output = shown(*given)
        sizes.append(output.nbytes)
        return output

    def watched_matches(*given: Any) -> Any:
        place, right = latest(*given)
        matched.append(len(place))
        sizes.append(right.nbytes)
        return place, right

    monkeypatch.setattr(Sides, "shown", watched)
    monkeypatch.setattr(AsofJoin, "_latest", watched_matches)
    with tempfile.TemporaryDirectory() as folder:
        one = FunctionShard(Path(folder), AsofJoin(sides, WITHIN * 1000), ["user"])
        one.run(rows, 0)
        found = one.run(rows.slice(0, 0), 60)
        assert sorted(row["v"] for row in found) == [*range(400)]
        assert {row["w"] for row in found} == {"x" * 10_000}
        assert one.stored(JOINED_LEFT) == one.stored(LATEST_RIGHT) == one.stored("timers_by_due") == []
    assert 50_000 < max(sizes) < 120_000
    assert sum(matched) == 400
    assert 100 <= matched[0] < 400  # each time all of the right side's rows are read


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=30), st.integers(1, 12), st.integers(1, 50))
def test_pairs_come_in_pieces(rows: list[tuple[int, int]], within: int, at_once: int) -> None:
    """However many pairs a row has, and however large: all of them, each once."""
    keys, times = (np.array(column, np.int64) for column in zip(*rows, strict=True)) if rows else ([], [])
    of = KeyedTimes(np.asarray(keys, np.int64), np.asarray(times, np.int64))
    expected = {(i, j) for i, one in enumerate(rows) for j, other in enumerate(rows) if one[0] == other[0]}
    expected = {(i, j) for i, j in expected if abs(rows[i][1] - rows[j][1]) <= within}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joins, "AT_ONCE_BYTES", 10 * at_once)
        pieces = list(Near(of, within, 4).pairs(of, 10))
    assert all(len(others) <= at_once for others, _ in pieces)
    found = [pair for others, near in pieces for pair in zip(others.tolist(), near.tolist(), strict=True)]
    assert sorted(found) == sorted(expected)


NUMBERED = st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9) | st.sampled_from([-(2**63), 2**62, 2**63 - 1])))


@given(NUMBERED, NUMBERED)
def test_places_ascend_as_keys_and_times_do(rows: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    """However far apart times are, also of rows that are looked for among others."""
    (key, at), (other_key, other_at) = (
        (np.array([k for k, _ in pairs], np.int64), np.array([t for _, t in pairs], np.int64))
        for pairs in (rows, others)
    )
    places, ascending = Places(at, 4), sorted(rows)
    found = places.of(key, at)
    assert [rows[i] for i in np.argsort(found, kind="stable")] == ascending
    assert places.times(key, found).tolist() == at.tolist()
    for side, bisect in (("left", bisect_left), ("right", bisect_right)):
        expected = [bisect(ascending, other) for other in others]
        assert np.searchsorted(np.sort(found), places.of(other_key, other_at, side)).tolist() == expected
