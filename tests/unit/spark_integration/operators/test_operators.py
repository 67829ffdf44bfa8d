"""Operators but joins on an embedded shard, beside the same in plain Python."""

from __future__ import annotations

import datetime as dt
import json
import math
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import clock
from holdfast.backends.arrow import crowds
from holdfast.backends.base import Found
from holdfast.backends.rocksdb import reads
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.rocksdb.generation import OPEN
from holdfast.backends.run import Keys
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import SchemaMismatchError
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration import timers
from holdfast.spark_integration.lookup.keys import hash_of_key
from holdfast.spark_integration.operators import partial
from holdfast.spark_integration.operators import sessions as operator_of_sessions
from holdfast.spark_integration.operators.accumulators import Accumulator, Collected, Count, Extreme, Own, Picked, Sum
from holdfast.spark_integration.operators.aggregation import WINDOW_END, WINDOW_START, Aggregation, Window
from holdfast.spark_integration.operators.deduplication import Deduplication
from holdfast.spark_integration.operators.panes import WindowPlaces
from holdfast.spark_integration.operators.sessions import Sessions
from holdfast.spark_integration.shard.operator import BatchTimes, ShardFunction, ShardInput
from holdfast.spark_integration.shard_call.call import gather_rows
from holdfast.spark_integration.spark_types import Watermark
from holdfast.spark_integration.timers import KeysAtOnce
from holdfast.spark_integration.transport.packed import (
    BLOB,
    BLOB_BYTES,
    EVENT_TIME,
    HASH,
    EventTime,
    PackedTransport,
    pack_rows,
    read_blob,
)
from holdfast.spark_integration.transport.routes import ROUTE, routes_of, shards_of
from holdfast.spark_integration.ttl.ends import Ttl
from tests.unit.spark_integration.embedded_shard import FunctionShard, rows_read

TIME = pa.timestamp("us", "UTC")
SPAN = pa.struct([("start", TIME), ("end", TIME)])
USER = pa.field("user", pa.string())
COLUMNS: tuple[Accumulator, ...] = (Count("n", None), Sum("total", "v", pa.int64()))
RESULTS = [pa.field("n", pa.int64()), pa.field("total", pa.int64())]
LENGTH, GAP = 10, 5  # ms
#: Micro-batches: rows of user, time in ms and value, and the watermark in ms.
ROWS = st.lists(
    st.tuples(st.sampled_from([None, "ann", "bob", "cem"]), st.integers(1, 60), st.none() | st.integers(-9, 9)),
    max_size=12,
)
BATCHES = st.lists(st.tuples(ROWS, st.integers(0, 60)), min_size=1, max_size=6).map(
    lambda batches: [(rows, max(mark for _, mark in batches[: i + 1])) for i, (rows, _) in enumerate(batches)]
)
#: Sessions that are over at once, and a pool that counts what Arrow holds of them; no buffer may outlive it.
OVER = 100_000
COUNTED = pa.proxy_memory_pool(pa.default_memory_pool())


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over goes in several turns, few as the rows are."""
    monkeypatch.setattr(KeysAtOnce.__init__, "__defaults__", (3,))


def at(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


def ms(time: dt.datetime) -> int:
    return round(time.timestamp() * 1000)


def table(rows: list[tuple[str | None, int, int, int | None]]) -> pa.Table:
    """Return rows of user, start, end and value."""
    users, starts, ends, values = zip(*rows, strict=True) if rows else ([], [], [], [])
    return pa.table(
        {
            "user": pa.array(users, pa.string()),
            WINDOW_START: pa.array([at(t) for t in starts], TIME),
            WINDOW_END: pa.array([at(t) for t in ends], TIME),
            "v": pa.array(values, pa.int64()),
        }
    )


def windows(
    emits: Any, accumulators: tuple[Accumulator, ...] = COLUMNS, length: int = LENGTH, slide: int | None = None
) -> Aggregation:
    output = pa.schema([USER, pa.field("window", SPAN), *RESULTS])
    window = Window("window", WindowPlaces(length * 1000, (slide or length) * 1000, 1000 if slide else 0), True)
    return Aggregation(pa.schema([USER, pa.field(WINDOW_START, TIME)]), accumulators, output, emits, window)


def sessions(*, is_streaming: bool = True) -> Sessions:
    output = pa.schema([USER, pa.field("session_window", SPAN), *RESULTS])
    return Sessions(pa.schema([USER, pa.field("session_start", TIME)]), COLUMNS, output, "session_window", is_streaming)


def sent(function: Aggregation, rows: pa.Table) -> pa.Table:
    """Return rows as a shard gets them: of one task each by itself, of another one for each key."""
    hashed = rows.append_column(HASH, pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows))
    before, half = function.before_shuffle, rows.num_rows // 2
    return pa.concat_tables([before.partial(hashed.slice(0, half)), before.combined(hashed.slice(half))])


@contextmanager
def shard(function: ShardFunction, *keys: str) -> Iterator[FunctionShard]:
    with tempfile.TemporaryDirectory() as folder:
        yield FunctionShard(Path(folder), function, list(keys))


def spans(output: list[dict[str, Any]], column: str) -> list[tuple[Any, ...]]:
    found = [(r["user"], ms(r[column]["start"]), ms(r[column]["end"]), r["n"], r["total"]) for r in output]
    return sorted(found, key=repr)


def added(rows: list[Any]) -> tuple[int, int | None]:
    values = [v for v in rows if v is not None]
    return len(rows), sum(values) if values else None


@pytest.mark.parametrize("emits", ["append", "update"])
@given(batches=BATCHES)
def test_windows_are_shown_when_they_are_over_or_change(batches: list[tuple[list[Any], int]], emits: str) -> None:
    """Each window holds all its rows since it was last over, and goes, from the index too, as the watermark passes.

    In append mode it is shown then, once; in update mode whenever it changes, also if the watermark has passed it.
    """
    held: dict[tuple[Any, int], list[Any]] = {}
    function = windows(emits)
    with shard(function, "user", WINDOW_START) as one:
        for rows, watermark in batches:
            starts = [(user, t - t % LENGTH, v) for user, t, v in rows]
            for user, start, v in starts:
                held.setdefault((user, start), []).append(v)
            over = {key for key in held if key[1] + LENGTH <= watermark}
            shown = over if emits == "append" else {(user, start) for user, start, _ in starts}
            expected = [(*key, key[1] + LENGTH, *added(held[key])) for key in shown]
            held = {key: values for key, values in held.items() if key not in over}
            rows_of_windows = table([(user, start, start + LENGTH, v) for user, start, v in starts])
            found = one.run(sent(function, rows_of_windows), watermark)
            assert spans(found, "window") == sorted(expected, key=repr)
            assert len(one.stored("state")) == len(one.stored("timers_by_due")) == len(held)
            assert one.earliest_ms == min((start + LENGTH - 1 for _, start in held), default=None)


@pytest.mark.parametrize("crowd_rows", [1_024, 1])
@given(batches=BATCHES)
def test_sessions_grow_together_and_go_once_they_are_over(
    batches: list[tuple[list[Any], int]], crowd_rows: int
) -> None:
    """State has exactly the open sessions, each under its start; the index may have more, until its time has come."""
    held: dict[Any, list[tuple[int, int, list[Any]]]] = {}
    with pytest.MonkeyPatch.context() as patched, shard(sessions(), "user") as one:
        patched.setattr(crowds, "CROWD_ROWS", crowd_rows)
        for name, value in (("_FIRST_REACH", 1), ("_REACH_GROWTH", 2), ("_LARGEST_REACH_US", GAP * 8_000)):
            patched.setattr(operator_of_sessions, name, value)
        for rows, watermark in batches:
            for user, t, v in rows:
                held.setdefault(user, []).append((t, t + GAP, [v]))
            held = {user: merged(parts) for user, parts in held.items()}
            over = [(user, *part) for user, parts in held.items() for part in parts if part[1] <= watermark]
            held = {user: [part for part in parts if part[1] > watermark] for user, parts in held.items()}
            expected = [(user, start, end, *added(values)) for user, start, end, values in over]
            found = one.run(table([(user, t, t + GAP, v) for user, t, v in rows]), watermark)
            assert spans(found, "session_window") == sorted(expected, key=repr)
            open_now = [(user, *part[:2], len(part[2])) for user, parts in held.items() for part in parts]
            stored = [(r["user"], ms(r["session_start"]), ms(r["session_end"]), r["n"]) for r in one.stored("s.state")]
            assert sorted(stored, key=repr) == sorted(open_now, key=repr)
            assert not open_now or one.earliest_ms <= min(end for _, _, end, _ in open_now) - 1  # type: ignore[operator]
        one.run(table([]), 1000)
        assert one.stored("s.state") == one.stored("timers_by_due") == []
        assert one.earliest_ms is None


def test_a_key_with_very_many_sessions_costs_as_its_near_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """New rows read the sessions around them, also far behind the newest; what is over is found by its key."""
    read = rows_read(monkeypatch)
    with shard(sessions(), "user") as one:
        starts = [2 * GAP * i for i in range(5_000)]
        one.run(table([("ann", t, t + GAP, 1) for t in starts] + [("cem", t, t + GAP, 1) for t in starts[:5]]), 0)
        for first in (0, GAP):
            read.clear()
            new = [("ann", starts[n] + first, starts[n + 1] - GAP + first, 1) for n in (100, 3_000)]
            found = one.run(table([*new, ("cem", first, first + GAP, 1)]), first + GAP)
            assert sorted(row["user"] for row in found) == ([] if first else ["ann", "cem"])
            assert 0 < sum(read) < 1_000
        ends = {ms(row["session_start"]): ms(row["session_end"]) for row in one.stored("s.state") if row["n"] > 1}
        assert ends[starts[3_000]] == starts[3_001] + GAP


@contextmanager
def moved_sessions(begins: list[tuple[str, int]]) -> Iterator[FunctionShard]:
    """Yield a shard whose sessions lie in RocksDB, as a process finds them that has read none."""
    with tempfile.TemporaryDirectory() as folder:
        one = FunctionShard(Path(folder), sessions(), ["user"], RocksDBBackend)
        one.run(table([(user, t, t + GAP, 1) for user, t in begins]), 0)
        one.maintain()
        one.run(table([("bob", 0, GAP, 1)]), 0)
        OPEN.forget()
        yield one


@pytest.mark.parametrize("others", [0, 300])
def test_a_key_with_very_many_sessions_is_not_read_whole_to_learn_it(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB tells of crowds only those that were met: a new process reads one run of a key, then what is near."""
    monkeypatch.setattr(RocksDBBackend, "share_bytes", lambda _: 0)
    monkeypatch.setattr(reads, "RUN_ROWS", 1_100)
    users = [("ann", 2 * GAP * i) for i in range(20_000)] + [(f"user {i}", 0) for i in range(others)]
    with moved_sessions(users) as one:
        read = rows_read(monkeypatch)
        one.run(table([(user, t + GAP, t + 2 * GAP, 1) for user, t in users[9_999::5_000]] * 2), 0)
        assert 0 < sum(read) < 5_000
        grown = [ms(row["session_start"]) for row in one.stored("s.state") if row["n"] > 1]
        assert sorted(grown) == sorted(t for _, t in users[9_999::5_000])


def test_keys_beside_those_with_very_many_sessions_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys turn out to have very many: no read begins again at the first key."""
    monkeypatch.setattr(RocksDBBackend, "share_bytes", lambda _: 0)
    monkeypatch.setattr(FunctionShard, "HASHES", 2**31)
    monkeypatch.setattr(crowds, "CROWD_ROWS", 100)
    monkeypatch.setattr(reads, "RUN_ROWS", 250)
    users = [(n * "u", 2 * GAP * i) for n in range(80) for i in range(90 if n % 4 else 300)]
    with moved_sessions(users) as one:
        read = rows_read(monkeypatch)
        one.run(table([(n * "u", GAP, 2 * GAP, 1) for n in range(80)]), 0)
        assert 60 * 90 < sum(read) < len(users)
        assert [row["n"] for row in one.stored("s.state") if row["n"] > 1] == 80 * [3]


def merged(parts: list[tuple[int, int, list[Any]]]) -> list[tuple[int, int, list[Any]]]:
    found: list[tuple[int, int, list[Any]]] = []
    for start, end, values in sorted(parts, key=lambda part: part[:2]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end), found[-1][2] + values)
        else:
            found.append((start, end, values))
    return found


@pytest.mark.parametrize("operator", [windows, sessions])
def test_large_rows_that_are_over_are_read_and_shown_in_turns(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause of the stream very many are over at once: of 100 KB each, no worker holds them all."""
    monkeypatch.setattr(timers, "AT_ONCE_BYTES", 10_000)
    usual = windows("append") if operator is windows else sessions()
    types = pa.schema([*list(usual.output_types)[:2], ("text", pa.string())])
    function = replace(usual, accumulators=(Extreme("text", "v", pa.string(), "max"),), output_types=types)
    rows = table([(f"user {n}", 0, LENGTH, None) for n in range(100)])
    rows = rows.set_column(3, "v", pa.array(["x" * 1000] * 100))
    read: list[int] = []
    get = Transaction.get

    def watched(transaction: Transaction, name: str, keys: Keys) -> Found:
        found = get(transaction, name, keys)
        read.append(found.values.nbytes)
        return found

    with shard(function, "user", *([WINDOW_START] if operator is windows else [])) as one:
        one.run(sent(function, rows) if isinstance(function, Aggregation) else rows, 0)
        monkeypatch.setattr(Transaction, "get", watched)
        assert len(one.run(rows.slice(0, 0), 1000)) == 100
        assert one.stored("state" if operator is windows else "s.state") == one.stored("timers_by_due") == []
    assert max(read) < 12_000, "all of them are 100,000"


@pytest.mark.slow(2)
def test_of_sessions_that_are_over_at_once_only_their_removal_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions are, after a pause of the stream: the commit needs their keys, and nothing else of them is held."""
    monkeypatch.setattr(timers, "AT_ONCE_BYTES", 200_000)
    numbers, function = np.arange(OVER), sessions()
    starts, ends = (pa.array((numbers % 50 + wait) * 1000).view(TIME) for wait in (0, GAP))
    rows = pa.table({"user": pa.array(numbers).cast(pa.string()), WINDOW_START: starts, WINDOW_END: ends, "v": numbers})
    hashes = pa.array(numbers * -7046029254386353131)

    def shown(rows: pa.Table, watermark_ms: int, transaction: Transaction) -> int:
        times = BatchTimes(0, watermark_ms, 0, None)
        given = ShardInput("op", 0, 0, rows, rows.select(["user"]), hashes.slice(0, len(rows)), times)
        return sum(len(output) for output in function.run(given, transaction))

    with MemoryBackend(tmp_path, function.tables(), clock.new_id) as backend:
        store, usual = VersionedStore(backend), pa.default_memory_pool()
        with store.begin(None) as transaction:
            shown(rows, 0, transaction)
            pointer = transaction.commit()
        with store.begin(pointer) as transaction:
            pa.set_memory_pool(COUNTED)
            tracemalloc.start()
            try:
                assert shown(rows.slice(0, 0), 1000, transaction) == OVER
                held_bytes = COUNTED.max_memory() + tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
                pa.set_memory_pool(usual)
    assert held_bytes / OVER < 100, "a key with its hash has 30, in state and in the index"


def test_sessions_of_a_batch_are_all_over() -> None:
    """A batch query has no watermark, and Spark shows all sessions at once."""
    with shard(sessions(is_streaming=False), "user") as one:
        found = one.run(table([("ann", 1, 6, 1), ("ann", 20, 25, 2), ("ann", 6, 11, 3)]))
        assert spans(found, "session_window") == [("ann", 1, 11, 2, 4), ("ann", 20, 25, 1, 2)]


@given(BATCHES)
def test_aggregates_by_key(batches: list[tuple[list[Any], int]]) -> None:
    held: dict[Any, list[Any]] = {}
    function = Aggregation(pa.schema([USER]), COLUMNS, pa.schema([USER, *RESULTS]), "update", None)
    with shard(function, "user") as one:
        for rows, _ in batches:
            for user, _, v in rows:
                held.setdefault(user, []).append(v)
            found = one.run(sent(function, table([(user, t, t, v) for user, t, v in rows])))
            expected = {(user, *added(held[user])) for user, _, _ in rows}
            assert sorted(((r["user"], r["n"], r["total"]) for r in found), key=repr) == sorted(expected, key=repr)
            assert one.earliest_ms is None


@pytest.mark.parametrize("keys", [4, 400, 4000, 40_000])
def test_rows_whose_keys_repeat_are_combined_before_the_shuffle(tmp_path: Path, keys: int) -> None:
    """A task sends a shard one row for each key, or every row where most keys are new; the shard adds up the same."""
    key = pa.field("user", pa.int64())
    function = Aggregation(pa.schema([key]), COLUMNS, pa.schema([key, *RESULTS]), "update", None)
    combiner, n = function.before_shuffle, 40_000
    users = np.arange(n) % keys
    hashes = pa.array((users * -7046029254386353131 & -1).astype(np.int64))
    rows = pa.record_batch({"user": users, "v": pa.array(np.ones(n, np.int64)), HASH: hashes})
    batches = [rows.slice(start, 10_000) for start in range(0, n, 10_000)]
    (packed,) = pack_rows(batches, routes_of(2), None, None, combiner)
    chunks, types = packed.to_pandas(), combiner.received(rows.schema)
    assert sum(read_blob(blob).num_rows for blob in chunks[BLOB]) == keys
    transport = PackedTransport(2, types, None, None, combiner)
    got = transport.receive([chunks], lambda tables: gather_rows(tables, types, tmp_path)).rows
    with shard(function, "user") as one:
        found = one.run(got)
    assert {(row["user"], row["n"], row["total"]) for row in found} == {(u, n // keys, n // keys) for u in range(keys)}


def rows_sent(function: Aggregation, users: np.ndarray, values: pa.Array) -> int:
    """Return how many rows a task sends for these."""
    hashes = pa.array((users * -7046029254386353131 & -1).astype(np.int64))
    rows = pa.record_batch({"user": users, "v": values, HASH: hashes})
    (packed,) = pack_rows([rows], routes_of(2), None, None, function.before_shuffle)
    return sum(read_blob(blob.as_py()).num_rows for blob in packed.column(BLOB))


def test_a_key_of_most_rows_is_combined_whatever_its_hash() -> None:
    """Such a key is why one aggregates before the shuffle, and a sample of the keys seldom has it."""
    key, n = pa.field("user", pa.int64()), 40_000
    function = Aggregation(pa.schema([key]), COLUMNS, pa.schema([key, *RESULTS]), "update", None)
    for hot in range(-8, 0):
        users = np.where(np.arange(n) % 4 > 0, hot, np.arange(n) // 4)
        assert rows_sent(function, users, pa.array(np.ones(n, np.int64))) == n // 4 + 1


def test_rows_are_sent_where_their_states_are_larger() -> None:
    """Each of several aggregates keeps the same long text, which the rows have once."""
    key, n = pa.field("user", pa.int64()), 4000
    kept = tuple(Extreme(name, "v", pa.string(), "max") for name in ("a", "b", "c"))
    users, texts = np.arange(n) // 2, pa.array([f"{i:0500}" for i in range(n)])
    types = pa.schema([key])
    assert rows_sent(Aggregation(types, kept[:1], types, "update", None), users, texts) == n // 2
    assert rows_sent(Aggregation(types, kept, types, "update", None), users, texts) == n


SLIDE, PANE = 4, 2  # ms: a window of `LENGTH` begins at 1, 5, 9, and so on
IN_PANES = EventTime(WINDOW_END, Watermark(0), filters_rows=True)


def in_panes(rows: list[tuple[str | None, int, int | None]]) -> pa.Table:
    """Return rows of user, time in ms and value as Spark hands them to a task: with their panes."""
    panes = [(user, t - (t - 1) % PANE, v) for user, t, v in rows]
    found = table([(user, start, start + PANE, v) for user, start, v in panes])
    return found.append_column(HASH, pa.array([window_hash(user, start) for user, start, _ in panes], pa.int64()))


def window_hash(user: str | None, start: int) -> int:
    found = hash_of_key([pa.scalar(user, pa.large_string()), pa.scalar(at(start), TIME)])
    assert found is not None
    return found - (1 << 64) * (found >> 63)


def route_of_window(user: str | None, start: int) -> int:
    hashes = np.array([window_hash(user, start)]).view(np.uint64)
    return routes_of(3)[shards_of(hashes, 3)[0]]


def starts_at(t: int) -> list[int]:
    """Return where the windows that have a time begin."""
    return [start for start in range(1 - 100 * SLIDE, t + 1, SLIDE) if start <= t < start + LENGTH]


@pytest.mark.parametrize("repeats", [1, 200])
@given(rows=ROWS)
def test_overlapping_windows_are_told_apart_before_the_shuffle(
    rows: list[tuple[str | None, int, int | None]], repeats: int
) -> None:
    """A task gets a row once, and sends to the shard of each of its windows what the row adds to it."""
    before = windows("update", slide=SLIDE).before_shuffle
    held: dict[tuple[str | None, int], list[int | None]] = {}
    for user, t, v in rows:
        for start in starts_at(t):
            held.setdefault((user, start), []).extend([v] * repeats)
    found: dict[tuple[str | None, int], list[int]] = {}
    marks = set()
    for packed in pack_rows(in_panes(rows * repeats).to_batches(5000), routes_of(3), IN_PANES, None, before):
        for row in packed.to_pylist():
            if row[BLOB] is None:
                marks.add((row[ROUTE], row[EVENT_TIME] // 1000))
                continue
            sent = read_blob(row[BLOB])
            for state in (before.partial(sent) if "v" in sent.column_names else sent).to_pylist():
                user, start = state["user"], ms(state[WINDOW_START])
                assert (state[HASH], state[WINDOW_END]) == (window_hash(user, start), at(start + LENGTH))
                assert row[ROUTE] == route_of_window(user, start)
                sums = found.setdefault((user, start), [0, 0])
                sums[0] += state["__holdfast_state.n"]
                sums[1] += state["__holdfast_state.total"] or 0
    assert found == {key: [len(values), sum(v or 0 for v in values)] for key, values in held.items()}
    assert marks == {(route_of_window(*key), key[1] + LENGTH) for key in held}


def test_panes_whose_rows_repeat_are_combined(tmp_path: Path) -> None:
    """A task sends a few states, of which the shard drops those of windows that are over, and no others."""
    function, n = windows("update", slide=SLIDE), 4000
    rows = in_panes([("ann", 1 + i % 10, 1) for i in range(n)])
    (packed,) = pack_rows(rows.to_batches(1000), routes_of(1), IN_PANES, None, function.before_shuffle)
    chunks, types = packed.to_pandas(), function.before_shuffle.received(rows.schema)
    assert sum(read_blob(blob).num_rows for blob in chunks[BLOB] if blob is not None) <= 15
    on_time = chunks[chunks[EVENT_TIME] > (5 + LENGTH - SLIDE) * 1000]
    transport = PackedTransport(1, types, IN_PANES, None, function.before_shuffle)
    received = transport.receive([on_time], lambda tables: gather_rows(tables, types, tmp_path))
    with shard(function, "user", WINDOW_START) as one:
        found = one.run(received.rows, 5 + LENGTH - SLIDE)
    expected = {start: sum(start <= 1 + i % 10 < start + LENGTH for i in range(n)) for start in (5, 9)}
    assert {ms(row["window"]["start"]): row["n"] for row in found} == expected
    assert received.late > 0


def test_wide_rows_are_told_apart_a_few_at_once() -> None:
    """Of 500 rows of 10 KB in 25 windows each a task never has all windows in memory."""
    kept = Collected("all", "v", pa.list_(pa.string()), "list")
    before = windows("update", (kept,), length=25, slide=1).before_shuffle
    rows = in_panes([("ann", i, None) for i in range(500)])
    rows = rows.set_column(rows.column_names.index("v"), "v", pa.array(["x" * 10_000] * 500))
    sizes = [(len(batch), batch.nbytes) for batch in before.spread(rows.to_batches())]
    assert sum(n for n, _ in sizes) == 25 * 500
    assert max(size for _, size in sizes) <= BLOB_BYTES


def test_windows_of_one_wide_row_are_made_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 1 MB in 3,600 windows would be more text than an Arrow array holds."""
    monkeypatch.setattr(partial, "BLOB_BYTES", 30_000)
    kept = Collected("all", "v", pa.list_(pa.string()), "list")
    before = windows("update", (kept,), length=40, slide=1).before_shuffle
    rows = in_panes([("ann", 7, None)]).set_column(3, "v", pa.array(["x" * 10_000]))
    batches = [*before.spread(rows.to_batches())]
    starts = [ms(start) for batch in batches for start in batch.column(WINDOW_START).to_pylist()]
    assert sorted(starts) == [*range(7 - 39, 7 + 1)]
    assert max(batch.nbytes for batch in batches) < 35_000


@pytest.mark.parametrize(
    ("column", "kept", "expected"),
    [
        ("all", Collected("all", "v", pa.list_(pa.int64()), "list"), [*range(3000)]),
        ("last", Picked("last", "v", pa.int64(), "last", False), 2999),
        (
            "own.last",
            Own(
                "own",
                "v",
                pa.int64(),
                pa.schema({"last": pa.int64()}),
                init=lambda values: {"last": values},
                merge=lambda groups, states: {"last": groups.last(states["last"])},
                finish=lambda states: states["last"],
            ),
            2999,
        ),
    ],
)
def test_values_by_arrival_keep_their_order_in_overlapping_windows(
    column: str, kept: Accumulator, expected: object
) -> None:
    """Rows of several panes take turns, and a window has them as they came."""
    function = windows("update", (kept,), slide=SLIDE)
    rows = in_panes([("ann", (7 * i) % 10 + 1, i) for i in range(3000)])
    (packed,) = pack_rows(rows.to_batches(), routes_of(1), None, None, function.before_shuffle)
    (blob,) = packed.column(BLOB).to_pylist()
    sent = read_blob(blob)
    in_window = pc.equal(sent.column(WINDOW_START), pa.scalar(at(1), TIME))
    assert sent.filter(in_window).column(f"__holdfast_state.{column}").to_pylist() == [expected]


@given(
    length=st.integers(1, 60),
    slide=st.integers(1, 60),
    start=st.integers(-30, 30),
    times=st.lists(st.integers(-100, 100), min_size=1),
)
def test_a_pane_is_in_the_windows_of_its_times(length: int, slide: int, start: int, times: list[int]) -> None:
    """Also where the slide is no part of the length, and before 1970."""
    slide = min(slide, length)
    places, size = WindowPlaces(length, slide, start % slide), math.gcd(length, slide)
    panes = np.array([t - (t - start) % size for t in times])
    pane, window = places.windows_of(panes)
    found = sorted(zip(pane.tolist(), window.tolist(), strict=True))
    first = start - slide * 200
    expected = [(i, w) for i, t in enumerate(times) for w in range(first, t + 1, slide) if w <= t < w + length]
    assert found == expected


@given(BATCHES, st.sampled_from([0, 7]))
def test_a_key_is_remembered_until_the_watermark_has_passed(batches: list[tuple[list[Any], int]], ttl: int) -> None:
    """The first row of a key comes, and again once the key is forgotten: after the micro-batch that passes its end."""
    held: dict[Any, int] = {}
    types = pa.schema([USER, pa.field(WINDOW_START, TIME), pa.field(WINDOW_END, TIME), pa.field("v", pa.int64())])
    with shard(Deduplication(pa.schema([USER]), types, Ttl(ttl * 1000, WINDOW_START)), "user") as one:
        for rows, watermark in batches:
            expected = []
            for user, t, _ in rows:
                if user not in held:
                    held[user] = t + ttl
                    expected.append((user, t))
            found = one.run(table([(user, t, t, v) for user, t, v in rows]), watermark)
            assert sorted(((r["user"], ms(r[WINDOW_START])) for r in found), key=repr) == sorted(expected, key=repr)
            held = {user: until for user, until in held.items() if until > watermark}
            assert {r["user"]: ms(r["until"]) for r in one.stored("state")} == held
            assert len(one.stored("timers_by_due")) == len(held)


@pytest.mark.parametrize(("keeps", "left"), [(True, 1), (False, 0)])
def test_a_key_without_a_time(keeps: bool, left: int) -> None:
    """It goes with the first watermark, as if of 1970, but never where the time is a part of it."""
    types = pa.schema([USER, pa.field("at", TIME)])
    with shard(Deduplication(pa.schema([USER]), types, Ttl(0, "at"), keeps), "user") as one:
        rows = pa.table({"user": ["ann"], "at": pa.nulls(1, TIME)})
        assert [len(one.run(rows, watermark)) for watermark in (0, 0, 5)] == [1, 1 - left, 0 if keeps else 1]
        one.run(rows.slice(0, 0), 6)
        assert len(one.stored("state")) == left


def test_a_key_is_remembered_in_processing_time() -> None:
    """Without a watermark the micro-batch's own time counts; what is over goes when the shard is called again."""
    types = pa.schema([USER, pa.field("v", pa.int64())])
    with shard(Deduplication(pa.schema([USER]), types, Ttl(10_000, None)), "user") as one:

        def run(now: int, *users: str) -> list[Any]:
            return [r["user"] for r in one.run(pa.table({"user": users, "v": [now] * len(users)}), None, now)]

        assert sorted(run(100, "ann", "ann", "bob")) == ["ann", "bob"]
        assert run(105, "cem", "ann") == ["cem"]
        assert run(110, "dan") == ["dan"]  # and ann and bob go
        assert sorted(r["user"] for r in one.stored("state")) == ["cem", "dan"]
        assert sorted(run(111, "ann", "cem")) == ["ann"]
        assert one.earliest_ms is None


def test_a_key_that_comes_after_its_ttl_is_new_though_nothing_came_meanwhile() -> None:
    """The row is shown, and remembered from then on: what was over before goes before rows are looked up."""
    types = pa.schema([USER, pa.field("v", pa.int64())])
    with shard(Deduplication(pa.schema([USER]), types, Ttl(10_000, None)), "user") as one:
        row = pa.table({"user": ["ann"], "v": [1]})
        assert [len(one.run(row, None, now)) for now in (100, 109, 500, 509, 510)] == [1, 0, 1, 0, 1]
        assert [len(one.stored(name)) for name in ("state", "timers_by_due")] == [1, 1]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (lambda: windows("append"), lambda: windows("append", length=20), "the window has changed"),
        (
            lambda: windows("append", (Extreme("n", "v", pa.int64(), "min"),)),
            lambda: windows("append", (Extreme("n", "v", pa.int64(), "max"),)),
            "column n was computed by another aggregate",
        ),
        (lambda: windows("append"), sessions, "by another kind of operator"),
        (
            lambda: windows("append", (Sum("n", "v", pa.int64()),)),
            lambda: windows("append", (Sum("n", "v", pa.float64()),)),
            "cannot be read with the columns",
        ),
    ],
)
def test_kept_at_a_restart(before: Callable[[], ShardFunction], after: Callable[[], ShardFunction], text: str) -> None:
    """Stored rows are of other windows, or of another aggregate under the same name: the error says which."""
    stored = StoredTables.of_first_run(before().tables())
    with pytest.raises(SchemaMismatchError, match=text):
        after().require_restartable(stored, before().configuration())


def test_a_restart_may_add_and_leave_out_aggregates() -> None:
    """An added one counts from then on; and the output mode may change, and a result be wider."""
    few, more = (
        (Count("n", None),),
        (Count("n", None), Sum("total", "v", pa.int64()), Extreme("w", "v", pa.int64(), "max")),
    )
    narrow = (Extreme("w", "v", pa.int32(), "max"),)
    for old, new in ((few, more), (more, few), (narrow, more)):
        stored = StoredTables.of_first_run(windows("append", old).tables())
        windows("update", new).require_restartable(stored, windows("append", old).configuration())


def test_an_aggregate_that_a_restart_added_cannot_change_either() -> None:
    """Stored columns say what has computed them, also those that no first run declared, or that were left out since."""
    n, least, most = (Count("n", None), Extreme("w", "v", pa.int64(), "min"), Extreme("w", "v", pa.int64(), "max"))
    tables = StoredTables.of_first_run(windows("append", (n,)).tables())
    for added in ((n, most), (n,)):
        tables = tables.with_declared(windows("append", added).tables())
        tables = StoredTables.read(json.loads(json.dumps(tables.to_json())), "the state")
        windows("append", (n, most)).require_restartable(tables, windows("append").configuration())
        with pytest.raises(SchemaMismatchError, match="column w was computed by another aggregate"):
            windows("append", (n, least)).require_restartable(tables, windows("append").configuration())
