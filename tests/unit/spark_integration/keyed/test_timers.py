"""Timers against a plain dict: what is due, when the earliest one is, after any history of writes and commits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import clock
from holdfast.backends.base import Backend
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.run import Keys, Run
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.mvcc import VersionedStore
from holdfast.spark_integration.keyed.pandas_with_state import NoTimeouts, Timeouts
from holdfast.spark_integration.timers import NO_TIMER, KeyTimers, Timers, timers_schema

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
                timeouts = Timeouts(KeyTimers(transaction, "EventTimeTimeout", earliest_ms), rule)
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


def test_an_operator_without_timeouts_has_none() -> None:
    keys = keys_of(KeyTimers.tables(KEY_TYPES, "EventTimeTimeout")["timers"], [0, 1])
    nothing = NoTimeouts()
    nothing.settle(keys, np.full(2, NO_TIMER), np.full(2, NO_TIMER), np.ones(2, np.bool_))
    assert nothing.get(keys).tolist() == [NO_TIMER, NO_TIMER]
    assert list(nothing.due(10, 10)) == []
    assert nothing.earliest(10) is None
