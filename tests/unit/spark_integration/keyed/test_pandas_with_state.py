"""The loop over keys, without Spark: what functions are called with, and what of their state and timers is kept."""

from __future__ import annotations

import math
import tempfile
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import LongType, StringType, StructField, StructType

from holdfast import clock
from holdfast.backends.base import Backend
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.run import Keys, Run
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import SchemaMismatchError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration import timers as shared_timers
from holdfast.spark_integration.keyed import slabs
from holdfast.spark_integration.keyed.frames import FrameFormat
from holdfast.spark_integration.keyed.pandas_with_state import PandasFunction, PandasWithState, Timeouts
from holdfast.spark_integration.timers import NO_TIMER, KeyTimers, Timers, timers_schema
from holdfast.spark_integration.ttl.expiry import ExpiringKeyRows, Expiry, expiring_tables
from tests.tiers import cases
from tests.unit.spark_integration.embedded_shard import EmbeddedShard

Calls = list[tuple[Any, ...]]


class Loop(EmbeddedShard):
    """The loop over the keys of an embedded shard."""

    def __init__(
        self,
        folder: Path,
        function: PandasFunction,
        timeout_conf: Any = "EventTimeTimeout",
        rule: Any = "documented",
        key_type: pa.DataType | None = None,
        rows_each: int = 10_000,
        state: StructType | None = None,
    ) -> None:
        self.key_types = pa.schema([("key", key_type or pa.string())])
        step = PandasWithState(
            function=function,
            key_types=self.key_types,
            state=state or StructType([StructField("n", LongType())]),
            output=StructType([StructField("key", StringType()), StructField("n", LongType())]),
            timeout_conf=timeout_conf,
            timeout_rule=rule,
            frame_format=FrameFormat("UTC"),
            rows_each=rows_each,
            shown_keys=[0],
            shown_columns=["key", "v"],
        )
        super().__init__(folder, step, ["key"])

    def run(self, rows: list[tuple[Any, int]] = (), now: int = 0) -> list[dict[str, Any]]:  # type: ignore[assignment]
        """Run a micro-batch in which both clocks stand at `now`, and return its output."""
        keys = pa.array([key for key, _ in rows], self.key_types.field(0).type)
        return self.micro_batch(pa.table({"key": keys, "v": pa.array([v for _, v in rows], pa.int64())}), now, now)

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(tuple(row.values()) for row in self.stored(table))

    def timers(self) -> dict[Any, int]:
        """The timers by key; that both tables say the same is checked."""
        by_key = dict(self.rows("timers"))
        assert len(self.rows("timers_by_due")) == len(by_key)
        earliest = min(by_key.values(), default=None)
        assert self.earliest_ms == earliest
        return by_key


class Script:
    """A function whose behaviour for a call the test gives as another function of the state."""

    def __init__(self) -> None:
        self.calls: Calls = []
        self.does: Any = lambda state: None

    def __call__(self, key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> list[pd.DataFrame]:
        seen = tuple(v for chunk in chunks for v in chunk["v"])
        self.calls.append((key[0], seen, state.getOption, state.hasTimedOut))
        self.does(state)
        return []

    def last(self) -> Calls:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def script() -> Script:
    return Script()


def set_at(due_ms: int) -> Any:
    return lambda state: state.setTimeoutTimestamp(due_ms)


def put(n: int) -> Any:
    return lambda state: state.update((n,))


def count(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n = (state.getOption or (0,))[0] + sum(len(chunk) for chunk in chunks)
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def test_every_key_is_called_once_with_its_rows_and_its_state(tmp_path: Path, script: Script) -> None:
    """C2, C3: in ascending order, null first, also where keys share a hash."""
    loop = Loop(tmp_path, script, "NoTimeout")
    script.does = put(7)
    loop.run([("b", 1), (None, 2), ("a", 3), ("b", 4), ("", 5)])
    assert script.last() == [
        (None, (2,), None, False),
        ("", (5,), None, False),
        ("a", (3,), None, False),
        ("b", (1, 4), None, False),
    ]
    loop.run([("b", 9), ("c", 8)])
    assert script.last() == [("b", (9,), (7,), False), ("c", (8,), None, False)]


def test_floating_keys_are_called_in_sparks_order(tmp_path: Path, script: Script) -> None:
    loop = Loop(tmp_path, script, "NoTimeout", key_type=pa.float64())
    keys = [2.5, math.nan, -1.0, None, math.inf, -math.inf, 0.0]
    loop.run([(key, 0) for key in keys])
    called = [call[0] for call in script.last()]
    assert math.isnan(called[0])  # null, as pandas shows it
    assert called[1:6] == [-math.inf, -1.0, 0.0, 2.5, math.inf]
    assert math.isnan(called[6])


@pytest.mark.parametrize("slab_keys", [1, 3, 20_000])
def test_slabs_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab_keys: int) -> None:
    monkeypatch.setattr(slabs, "SLAB_KEYS", slab_keys)
    loop = Loop(tmp_path, count, "NoTimeout")
    keys = [f"k{i % 10}" for i in range(25)]
    loop.run([(key, 1) for key in keys])
    output = loop.run([(key, 1) for key in [*keys, "new"]])
    assert output == [{"key": f"k{i}", "n": 6 if i < 5 else 4} for i in range(10)] + [{"key": "new", "n": 1}]
    assert len(loop.rows("state")) == 11


@pytest.mark.parametrize("writes", cases([True, False]))
@pytest.mark.parametrize("timed_out", [False, True])
def test_large_states_are_held_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool, timed_out: bool
) -> None:
    """20,000 keys of 100 kB each are 2 GB, and as much again as Python's objects; read or written."""
    monkeypatch.setattr(shared_timers, "AT_ONCE_BYTES", 1 << 20)
    monkeypatch.setattr(shared_timers.KeysAtOnce.__init__, "__defaults__", (4,))
    slabs.at_once_of.cache_clear()
    found: list[str | None] = []

    def call(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> list[pd.DataFrame]:
        text = (state.getOption or (None,))[0]
        found.append(text and text[:4])
        if writes or text is None:
            state.update((key[0] * 25_000,))
            state.setTimeoutTimestamp(10 if text is None else 20)
        return []

    loop = Loop(tmp_path, call, state=StructType([StructField("text", StringType())]))
    keys = [f"k{i}" for i in range(100, 300)]
    for now in (0, 11 if timed_out else 0):
        tracemalloc.start()
        try:
            loop.run([] if now else [(key, 1) for key in keys], now)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 6 << 20, "all of it is 20 MB"
    assert found == [None] * 200 + keys


def test_what_is_not_changed_is_not_written(tmp_path: Path, script: Script) -> None:
    """P1: no version where nothing was written."""
    loop = Loop(tmp_path, script)
    loop.run([("a", 1)])
    assert loop.pointer is None
    script.does = put(1)
    loop.run([("a", 1), ("b", 1)])
    before = loop.pointer
    script.does = lambda state: state.exists
    loop.run([("a", 1)])
    assert loop.pointer == before
    script.does = lambda state: state.remove()
    loop.run([("a", 1), ("absent", 1)])
    assert loop.rows("state") == [("b", 1)]


# Timeouts


def test_timers_fire_in_the_order_in_which_they_are_due(tmp_path: Path, script: Script) -> None:
    loop = Loop(tmp_path, script)
    for key, due_ms in [("a", 30), ("b", 10), ("c", 20), ("d", 10), ("later", 99)]:
        script.does = set_at(due_ms)
        loop.run([(key, 1)], now=1)
    script.last()
    script.does = put(1)
    loop.run(now=31)
    assert [call[0] for call in script.last()] == ["b", "d", "c", "a"]
    assert loop.rows("state") == [(key, 1) for key in "abcd"]
    assert loop.timers() == {"later": 99}


# Errors


def test_a_wrong_return_names_its_key(tmp_path: Path) -> None:
    loop = Loop(tmp_path, lambda key, chunks, state: 7)  # type: ignore[arg-type, return-value]
    with pytest.raises(Exception, match="UDF_RETURN_TYPE") as caught:
        loop.run([("a", 1)])
    assert caught.value.__notes__ == ["raised in operator 'op' for key ('a',)"]


@pytest.mark.slow(1)
def test_many_timers_due_at_once_cost_by_what_is_due(tmp_path: Path, script: Script) -> None:
    """Thousands with one due time are found, fired and removed; none of them twice."""
    n = 4_000
    loop = Loop(tmp_path, script, key_type=pa.int64())
    script.does = set_at(1000)
    loop.run([(i, 1) for i in range(n)], now=1)
    script.last()
    script.does = lambda state: None
    loop.run(now=1001)
    called = [call[0] for call in script.last()]
    assert called == list(range(n))
    assert loop.timers() == {}
    assert np.all(np.diff(called) == 1)


def test_a_restart_may_not_declare_not_null_what_may_be_null(tmp_path: Path) -> None:
    """Else a stored null would reach a function that is promised none; each run of the query counts."""

    def step(*, nullable: bool) -> PandasWithState:
        state = StructType([StructField("n", LongType(), nullable)])
        return Loop(tmp_path / str(nullable), lambda *_: [], state=state).function

    loose, strict = step(nullable=True), step(nullable=False)
    always = StoredTables.of_first_run(strict.tables())
    between = always.with_declared(loose.tables()).with_declared(strict.tables())
    for went_before in (always, between):
        loose.require_restartable(went_before, {})
    strict.require_restartable(always, {})
    for went_before in (StoredTables.of_first_run(loose.tables()), between):
        with pytest.raises(SchemaMismatchError, match=r"n: it is NOT NULL.*table=state"):
            strict.require_restartable(went_before, {})


def test_state_of_an_operator_with_a_time_to_live_expires_still(tmp_path: Path, script: Script) -> None:
    """A function by key may take the place of a vectorised one: what expires is neither seen nor kept."""
    loop = Loop(tmp_path / "none", script, "ProcessingTimeTimeout")
    declared = loop.function.tables()
    stored = {**declared, **expiring_tables("state", loop.key_types, pa.schema([("n", pa.int64())]))}
    tables = StoredTables.of_first_run(stored).with_declared(declared)
    backend = MemoryBackend(tmp_path / "ttl", stored, clock.new_id)
    loop.store = VersionedStore(backend, None, tables.declared, tables.names)
    with VersionedStore(backend).begin(None) as transaction:
        hashes = np.array([sum(repr(key).encode()) % 5 for key in "ab"])
        keys = Keys.of(stored["state"], hashes, pa.table({"key": ["a", "b"]}))
        ExpiringKeyRows(transaction, Expiry("state", 100, 1000, None), keys).put(pa.table({"n": [1, 2]}))
        loop.pointer, loop.earliest_ms = transaction.commit(), 1100
    script.does = lambda state: state.update((7,)) if state.getCurrentProcessingTimeMs() < 1100 else None
    loop.run([("a", 0)], now=1050)
    loop.run([("a", 0), ("b", 0)], now=1100)
    assert [call[2] for call in script.last()] == [(1,), (7,), None]
    loop.run(now=1200)
    assert loop.rows("state") == [("a", 7, None)]
    assert loop.rows("state.expiring") == []
    assert loop.earliest_ms is None


KEY_TYPES = pa.schema([("user", pa.string())])
USERS: list[str | None] = ["ann", "bob", "cem", "", None]
HASHES = np.array([7, 7, 2**63, 0, 2**64 - 1], np.uint64)  # two share one; the ends of the range
TIMES = [-(2**62), -1, 0, 1, 999, 1000, 1001, 2**62]

users = st.integers(0, len(USERS) - 1)
timers = st.tuples(users, st.sampled_from(TIMES))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(timers, max_size=4)),
        st.tuples(st.just("remove"), st.lists(timers, max_size=4)),
        st.tuples(st.just("commit"), st.just([])),
    ),
    max_size=12,
)


def keys_of(schema: Any, numbers: list[int]) -> Keys:
    columns = pa.table([pa.array([USERS[i] for i in numbers], pa.string())], schema=KEY_TYPES)
    return Keys.of(schema, HASHES[numbers], columns)


def seen(found: Any) -> list[tuple[str | None, int, int]]:
    """Timers as key, hash of the key and time."""
    return [
        (key["user"], key_hash, due_ms)
        for some in found
        for key, key_hash, due_ms in zip(
            some.keys.columns.to_pylist(), some.keys.hashes.tolist(), some.due_ms.tolist(), strict=True
        )
    ]


@given(steps, st.sampled_from(TIMES), st.sampled_from(TIMES), st.integers(1, 3))
def test_timers_are_a_set_in_the_order_of_time(
    history: list[tuple[str, list[tuple[int, int]]]], first_ms: int, before_ms: int, timers_each: int
) -> None:
    """A key may have several; removing one that is not there is fine."""
    schema = timers_schema("timers", KEY_TYPES)
    expected: set[tuple[int, int]] = set()
    with tempfile.TemporaryDirectory() as folder:
        store = VersionedStore(MemoryBackend(Path(folder), {"timers": schema}, clock.new_id))
        transaction = store.begin(None)
        for step, some in history:
            if step == "commit":
                transaction = store.begin(transaction.commit())
                continue
            keys, due_ms = keys_of(schema, [i for i, _ in some]), np.array([t for _, t in some], np.int64)
            if step == "add":
                Timers(transaction, "timers").add(keys, due_ms)
                expected |= set(some)
            else:
                Timers(transaction, "timers").remove(keys, due_ms)
                expected -= set(some)
        found = list(Timers(transaction, "timers").due(first_ms, before_ms, timers_each))
        earliest = Timers(transaction, "timers").earliest(first_ms)
        transaction.abort()
    due = [(t, i) for i, t in expected if first_ms <= t < before_ms]
    assert sorted(seen(found), key=repr) == sorted(((USERS[i], int(HASHES[i]), t) for t, i in due), key=repr)
    assert [t for _, _, t in seen(found)] == sorted(t for t, _ in due)
    assert all(0 < len(some) <= timers_each for some in found)
    assert earliest == min((t for _, t in expected if t >= first_ms), default=None)


def test_timers_may_be_added_while_those_that_are_due_fire(tmp_path: Path) -> None:
    """What a fired timer sets does not fire in the same pass."""
    schema = timers_schema("timers", KEY_TYPES)
    store = VersionedStore(MemoryBackend(tmp_path, {"timers": schema}, clock.new_id))
    with store.begin(None) as transaction:
        by_due = Timers(transaction, "timers")
        by_due.add(keys_of(schema, [0, 1, 2]), np.array([1, 2, 3]))
        fired = []
        for some in by_due.due(0, 100, 1):
            fired += some.due_ms.tolist()
            by_due.remove(some.keys, some.due_ms)
            by_due.add(some.keys, some.due_ms + 50)
        assert fired == [1, 2, 3]
        assert by_due.earliest(0) == 51


@pytest.mark.parametrize("backend_class", [MemoryBackend, RocksDBBackend])
def test_the_earliest_of_many_timers_of_one_time_costs_what_was_removed(
    tmp_path: Path, backend_class: type[Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durations make timers due together; a batch that moves a few of them must not read the others."""
    many, moved = 50_000, 1_000
    schema = timers_schema("timers", KEY_TYPES)
    numbers = np.arange(many)
    keys = Keys.of(schema, numbers.astype(np.uint64), pa.table({"user": numbers.astype(str)}))
    read: list[int] = []

    def counted(runs: Iterator[Run]) -> Iterator[Run]:
        for run in runs:
            read.append(len(run))
            yield run

    with backend_class(tmp_path / "shard", {"timers": schema}, clock.new_id) as backend:
        store = VersionedStore(backend)
        with store.begin(None) as transaction:
            Timers(transaction, "timers").add(keys, np.full(many, 1_000))
            pointer = transaction.commit()
        for start in range(0, 5 * moved, moved):
            with store.begin(pointer) as transaction:
                timers, some = Timers(transaction, "timers"), keys.take(np.arange(start, start + moved))
                timers.remove(some, np.full(moved, 1_000))
                timers.add(some, np.full(moved, 2_000))
                view = transaction.view
                assert view is not None
                monkeypatch.setattr(view, "scan", lambda *asked, scan=view.scan: counted(scan(*asked)))
                assert timers.earliest(0) == 1_000
                pointer = transaction.commit()
    assert len(read) >= 5
    assert sum(read) <= 5 * 4 * moved


calls = st.lists(
    st.tuples(users, st.sampled_from([NO_TIMER, 5, 10, 15]), st.booleans()), max_size=5, unique_by=lambda call: call[0]
)


@pytest.mark.slow(1)
@pytest.mark.parametrize("rule", ["documented", "spark"])
@given(st.lists(st.tuples(calls, st.integers(1, 16)), max_size=6))
def test_timeouts_keep_one_timer_a_key(rule: Any, batches: list[tuple[list[tuple[int, int, bool]], int]]) -> None:
    """Micro-batches in which keys are called, and then those that are due: both tables and the bound always agree."""
    tables = KeyTimers.tables(KEY_TYPES, "EventTimeTimeout")
    model: dict[int, int] = {}
    earliest_ms = None
    with tempfile.TemporaryDirectory() as folder:
        store = VersionedStore(MemoryBackend(Path(folder), dict(tables), clock.new_id))
        pointer, now = None, 0
        for called, later in batches:
            now += later
            with store.begin(pointer) as transaction:
                timeouts = Timeouts(transaction, "EventTimeTimeout", earliest_ms, rule)
                numbers = [i for i, _, _ in called]
                keys = keys_of(tables["timers"], numbers)
                old_ms = timeouts.get(keys)
                assert old_ms.tolist() == [model.get(i, NO_TIMER) for i in numbers]
                # A timer is set at or after the time that fires.
                set_ms = np.array([NO_TIMER if t == NO_TIMER else now + t for _, t, _ in called], np.int64)
                written = np.array([w for _, _, w in called], np.bool_)
                timeouts.settle(keys, old_ms, set_ms, written)
                for (i, _, is_written), t in zip(called, set_ms.tolist(), strict=True):
                    if t != NO_TIMER:
                        model[i] = t
                    elif is_written or rule == "documented":
                        model.pop(i, None)
                fired = list(timeouts.due(now, 2))
                due = {i: t for i, t in model.items() if t < now}
                assert sorted(seen(fired), key=repr) == sorted(
                    ((USERS[i], int(HASHES[i]), t) for i, t in due.items()), key=repr
                )
                for some in fired:
                    nothing = np.full(len(some), NO_TIMER)
                    timeouts.settle(some.keys, some.due_ms, nothing, np.zeros(len(some), np.bool_))
                if rule == "documented":
                    model = {i: t for i, t in model.items() if i not in due}
                earliest_ms = timeouts.earliest(now)
                assert earliest_ms == min(model.values(), default=None)
                pointer = transaction.commit()


def test_an_operator_without_timeouts_has_none(tmp_path: Path) -> None:
    """Nor tables of them, though Spark may call its shard for rows of an earlier run that expire."""
    keys = keys_of(KeyTimers.tables(KEY_TYPES, "EventTimeTimeout")["timers"], [0, 1])
    with VersionedStore(MemoryBackend(tmp_path / "none", {}, clock.new_id)).begin(None) as transaction:
        nothing = Timeouts(transaction, "NoTimeout", 5, "documented")
        nothing.settle(keys, np.full(2, NO_TIMER), np.full(2, NO_TIMER), np.ones(2, np.bool_))
        assert nothing.get(keys).tolist() == [NO_TIMER, NO_TIMER]
        assert list(nothing.due(10, 10)) == []
        assert nothing.earliest(10) is None
