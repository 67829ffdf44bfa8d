"""`top`, `latest` and what is remembered for a while, on an embedded shard, beside the same in plain Python."""

from __future__ import annotations

import datetime as dt
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import cmp_to_key
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.base import Backend
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import SchemaMismatchError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.operators.deduplication import DeduplicationByTime
from holdfast.spark_integration.operators.top import Emits, Latest, Ranking, Top
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.ttl.ends import Ttl
from tests.unit.spark_integration.embedded_shard import FunctionShard

TIME = pa.timestamp("us", "UTC")
ITEM = pa.field("item", pa.string())
#: What a row carries beside its key: what it is ranked by, when it was, and a value of each kind.
VALUES = pa.schema(
    [
        pa.field("price", pa.float64()),
        pa.field("level", pa.int32()),
        pa.field("at", TIME),
        pa.field("note", pa.struct([("text", pa.string()), ("tags", pa.list_(pa.string()))])),
        pa.field("by_name", pa.map_(pa.string(), pa.decimal128(10, 2))),
        pa.field("id", pa.int64()),
    ]
)
COLUMNS = pa.schema([ITEM, *VALUES])
Row = dict[str, Any]
PRICES = st.sampled_from([None, math.nan, math.inf, -0.0, 0.0, 1.5, 2.5, -math.inf])
ROWS = st.lists(
    st.tuples(st.sampled_from([None, "tea", "rice", ""]), PRICES, st.none() | st.integers(-2, 2), st.integers(1, 60)),
    max_size=12,
)
BATCHES = st.lists(st.tuples(ROWS, st.integers(0, 60)), min_size=1, max_size=6)
BY = st.sampled_from([(("price",), (False,)), (("price",), (True,)), (("level", "price"), (True, False))])


def at(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


def rows_of(batches: list[tuple[list[Any], int]]) -> list[tuple[list[Row], int]]:
    """Return the rows of micro-batches, each with a number of its own, and the watermark, which never falls."""
    found: list[tuple[list[Row], int]] = []
    number = 0
    watermark = 0
    for rows, mark in batches:
        watermark = max(watermark, mark)
        made = []
        for item, price, level, ms in rows:
            number += 1
            note = None if number % 3 == 0 else {"text": f"n{number}", "tags": ["a", None] * (number % 2)}
            prices = [("x", Decimal(number))] if number % 2 else []
            made.append(
                {"item": item, "price": price, "level": level, "at": at(ms), "note": note, "by_name": prices}
                | {"id": number, "ms": ms}
            )
        found.append((made, watermark))
    return found


def table(rows: list[Row]) -> pa.Table:
    return pa.table({f.name: pa.array([row[f.name] for row in rows], f.type) for f in COLUMNS}, schema=COLUMNS)


def compared(ranking: Ranking, one: Row, other: Row) -> int:
    """Compare two rows as Spark sorts: null below everything, NaN above all numbers."""
    for name, ascends in zip(ranking.columns, ranking.ascending, strict=True):
        a, b = (_place(row[name]) for row in (one, other))
        if a != b:
            return (1 if a > b else -1) * (1 if ascends else -1)
    return 0


def _place(value: Any) -> tuple[int, Any]:
    if value is None:
        return (0, 0)
    return (2, 0) if isinstance(value, float) and math.isnan(value) else (1, value)


def ranked(ranking: Ranking, rows: list[Row]) -> list[Row]:
    return sorted(rows, key=cmp_to_key(lambda one, other: compared(ranking, one, other)))


def top(ranking: Ranking, places: int, emits: Emits, ttl: Ttl | None = None) -> Top:
    own = pa.field("place", pa.int32()) if emits == "list" else pa.field("change_type", pa.string())
    return Top(pa.schema([ITEM]), VALUES, pa.schema([ITEM, own, *VALUES]), ranking, places, emits, ttl)


def latest(ranking: Ranking, ttl: Ttl | None = None) -> Latest:
    return Latest(pa.schema([ITEM]), VALUES, COLUMNS, ranking, ttl)


@contextmanager
def shard(function: ShardFunction, backend: type[Backend] = MemoryBackend) -> Iterator[FunctionShard]:
    with tempfile.TemporaryDirectory() as folder:
        yield FunctionShard(Path(folder), function, ["item"], backend)


def plain(rows: list[Row], *names: str) -> list[str]:
    """Return rows for comparison, whatever their order, with values as Arrow shows them; NaN equals itself."""
    shown = zip(rows, table(rows).to_pylist(), strict=True)
    return sorted(repr({name: row[name] for name in names} | values) for row, values in shown)


@given(BATCHES, BY, st.integers(1, 3), st.sampled_from(["list", "changes"]))
def test_the_first_rows_of_each_key(batches: list[Any], by: Any, places: int, emits: Emits) -> None:
    """Lists that have changed come whole, or what has left and entered them; of equal rows the older one stays."""
    ranking = Ranking(*by)
    held: dict[Any, list[Row]] = {}
    with shard(top(ranking, places, emits)) as one:
        for rows, watermark in rows_of(batches):
            before = {item: list(listed) for item, listed in held.items()}
            for item in {row["item"] for row in rows}:
                own = [row for row in rows if row["item"] == item]
                held[item] = ranked(ranking, [*held.get(item, []), *own])[:places]
            changed = [item for item, listed in held.items() if listed != before.get(item, [])]
            expected: list[Row] = []
            for item in changed:
                old = before.get(item, [])
                if emits == "list":
                    expected += [row | {"place": place} for place, row in enumerate(held[item], 1)]
                else:
                    expected += [row | {"change_type": "delete"} for row in old if row not in held[item]]
                    expected += [row | {"change_type": "insert"} for row in held[item] if row not in old]
            own_column = "place" if emits == "list" else "change_type"
            assert plain(one.run(table(rows), watermark), own_column) == plain(expected, own_column)
            stored = [row | {"place": p} for listed in held.values() for p, row in enumerate(listed, 1)]
            assert plain(one.stored("s.state"), "place") == plain(stored, "place")


@given(BATCHES, BY)
def test_the_newest_row_of_each_key(batches: list[Any], by: Any) -> None:
    """A key is shown when a newer row has come; late rows, and those as new as the stored one, are ignored."""
    ranking = Ranking(*by)
    held: dict[Any, Row] = {}
    with shard(latest(ranking), FilesystemBackend) as one:
        for rows, watermark in rows_of(batches):
            before = dict(held)
            for item in {row["item"] for row in rows}:
                own = [row for row in rows if row["item"] == item]
                held[item] = ranked(ranking, [*([held[item]] if item in held else []), *own])[0]
            expected = [row for item, row in held.items() if before.get(item) is not row]
            assert plain(one.run(table(rows), watermark)) == plain(expected)
            assert plain(one.stored("state")) == plain([*held.values()])


@given(BATCHES, st.sampled_from([1, 7]), st.booleans())
def test_keys_are_forgotten_by_event_time(batches: list[Any], ttl: int, is_top: bool) -> None:
    """A key goes once the watermark has passed its rows' times by the ttl: before the rows that come then."""
    ranking, remembers = Ranking(("level",), (False,)), Ttl(ttl * 1000, "at")
    held: dict[Any, list[Row]] = {}
    places = 2 if is_top else 1
    function: ShardFunction = top(ranking, 2, "list", remembers) if is_top else latest(ranking, remembers)
    with shard(function) as one:
        for rows, watermark in rows_of(batches):
            held = {i: r for i, r in held.items() if max(row["ms"] for row in r) + ttl > watermark}
            before = {item: list(listed) for item, listed in held.items()}
            for item in {row["item"] for row in rows}:
                own = [row for row in rows if row["item"] == item]
                held[item] = ranked(ranking, [*held.get(item, []), *own])[:places]
            expected = [row for i, listed in held.items() if listed != before.get(i, []) for row in listed]
            assert plain(one.run(table(rows), watermark)) == plain(expected)
            stored = one.stored("s.state" if is_top else "state")
            assert plain(stored) == plain([row for listed in held.values() for row in listed])
            ends = [max(row["ms"] for row in listed) + ttl for listed in held.values()]
            assert not ends or one.earliest_ms <= min(ends) - 1  # type: ignore[operator]
        one.run(table([]), 1000)
        assert one.stored("s.state" if is_top else "state") == one.stored("timers_by_due") == []
        assert one.earliest_ms is None


@pytest.mark.parametrize("is_top", [True, False])
def test_keys_are_forgotten_by_processing_time(is_top: bool) -> None:
    """Without a watermark the micro-batch's own time counts; the shard is not called for it."""
    ranking, remembers = Ranking(("level",), (False,)), Ttl(10_000, None)
    function: ShardFunction = top(ranking, 2, "list", remembers) if is_top else latest(ranking, remembers)
    [(rows, _)] = rows_of([([("tea", 1.0, 2, 1), ("rice", 1.0, 1, 1)], 0)])
    tea, rice = table(rows[:1]), table(rows[1:])
    with shard(function) as one:
        assert [len(one.run(tea, None, now)) for now in (100, 109)] == [1, 2 if is_top else 0]
        assert len(one.run(rice, None, 119 if is_top else 110)) == 1  # and tea goes
        assert [len(one.stored(name)) for name in ("s.state" if is_top else "state", "timers_by_due")] == [1, 1]
        assert one.earliest_ms is None


@given(BATCHES, st.sampled_from([1, 7, 25]))
def test_a_key_is_new_again_after_its_ttl_by_the_rows_own_times(batches: list[Any], ttl: int) -> None:
    """Whatever the watermark was when the row came: after a pause it lags behind, and duplicates would be lost."""
    held: dict[Any, int] = {}
    with shard(DeduplicationByTime(pa.schema([ITEM]), COLUMNS, Ttl(ttl * 1000, "at"))) as one:
        for rows, watermark in rows_of(batches):
            expected = []
            for row in sorted(rows, key=lambda row: row["ms"]):
                if row["ms"] >= held.get(row["item"], 0):
                    held[row["item"]] = row["ms"] + ttl
                    expected.append(row)
            assert plain(one.run(table(rows), watermark)) == plain(expected)
            held = {item: until for item, until in held.items() if until > watermark}
            assert {r["item"]: r["until"] for r in one.stored("state")} == {i: at(ms) for i, ms in held.items()}
            assert not held or one.earliest_ms <= min(held.values()) - 1  # type: ignore[operator]
        one.run(table([]), 1000)
        assert one.stored("state") == one.stored("timers_by_due") == []


def test_the_number_of_places_may_change_and_the_ranking_may_not() -> None:
    """A list that may be longer fills with the next rows; another order would be another list."""
    by_price, by_level = Ranking(("price",), (False,)), Ranking(("level",), (False,))
    for make in (lambda ranking: top(ranking, 3, "list"), latest):
        stored, configuration = StoredTables.of_first_run(make(by_price).tables()), make(by_price).configuration()
        make(by_price).require_restartable(stored, configuration)
        with pytest.raises(SchemaMismatchError, match="the ranking has changed"):
            make(by_level).require_restartable(stored, configuration)
    with tempfile.TemporaryDirectory() as folder:
        one = FunctionShard(Path(folder), top(by_price, 3, "list"), ["item"])
        [(rows, _)] = rows_of([([("tea", price, 0, 1) for price in (1.5, 2.5, 0.5)], 0)])
        one.run(table(rows))
        one.restart_with(top(by_price, 1, "changes"))
        [(more, _)] = rows_of([([("tea", 2.0, 0, 1)], 0)])
        assert [row["price"] for row in one.run(table(more))] == [1.5, 0.5]
        assert [row["price"] for row in one.stored("s.state")] == [2.5]
