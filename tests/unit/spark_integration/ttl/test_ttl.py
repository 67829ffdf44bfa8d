"""State that expires: invisible at once, gone with the shard's next call, and found by its time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.base import Found
from holdfast.backends.run import Keys
from holdfast.mvcc import Transaction
from holdfast.spark_integration import timers as shared_timers
from holdfast.spark_integration.vectorised.arrow_with_state import ArrowWithState, StateColumns
from holdfast.spark_integration.vectorised.batch import ShardBatch
from tests.unit.spark_integration.embedded_shard import COUNT, KEY_TYPES, FunctionShard, OperatorShard, counts_of

TTL_MS = 1000


@pytest.fixture
def shard(tmp_path: Path) -> OperatorShard:
    return OperatorShard(tmp_path, {"state": StateColumns(COUNT, TTL_MS)}, "ProcessingTime")


def put(n: int) -> Any:
    return lambda batch: batch.state.put(n=[n] * batch.keys.num_rows)


def test_what_has_expired_is_removed_when_the_shard_is_called(shard: OperatorShard) -> None:
    """With processing time Spark calls the shard for it: the earliest time that it is told is that of the index."""
    shard.run(["ann", "bob"], 0, put(1))
    shard.run(["bob"], 500, put(2))
    assert shard.earliest_ms is not None
    assert TTL_MS <= shard.earliest_ms <= TTL_MS + TTL_MS // 64
    shard.run([], shard.earliest_ms, lambda batch: None)
    assert [row["user"] for row in shard.stored("state")] == ["bob"]
    shard.run([], 3 * TTL_MS, lambda batch: None)
    assert shard.stored("state") == shard.stored("state.expiring") == []
    assert shard.earliest_ms is None


def test_large_rows_that_expire_are_looked_up_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 of them are evicted at once: of 100 KB each, no worker holds them all."""
    monkeypatch.setattr(shared_timers.KeysAtOnce.__init__, "__defaults__", (4,))
    monkeypatch.setattr(shared_timers, "AT_ONCE_BYTES", 10_000)
    types = pa.schema([("text", pa.string())])
    shard = OperatorShard(tmp_path, {"state": StateColumns(types, TTL_MS)}, "ProcessingTime")
    users = [f"user {n}" for n in range(100)]
    shard.run(users, 0, lambda batch: batch.state.put(text=["x" * 1000] * len(users)))
    held: list[int] = []
    get = Transaction.get

    def watched(transaction: Transaction, table: str, keys: Keys) -> Found:
        found = get(transaction, table, keys)
        held.append(found.values.nbytes)
        return found

    monkeypatch.setattr(Transaction, "get", watched)
    shard.run([], 2 * TTL_MS, lambda batch: None)
    assert shard.stored("state") == shard.stored("state.expiring") == []
    assert max(held) < 12_000, "all of them are 100,000"


def refresh(batch: ShardBatch) -> None:
    batch.state.put(n=pc.add(pc.coalesce(batch.state.get()["n"], 0), 1))


@pytest.mark.slow(2)
def test_a_row_written_in_every_micro_batch_moves_once_in_its_time_to_live(shard: OperatorShard) -> None:
    """What a refresh costs: nothing in the index, until the time there has come."""
    seen = set()
    for now in range(0, 3 * TTL_MS, 30):
        shard.run(["ann"], now, refresh)
        (entry,) = shard.stored("state.expiring")
        assert entry["user"] == "ann"
        assert shard.earliest_ms is not None
        assert shard.earliest_ms > now
        seen.add(shard.earliest_ms)
    assert len(seen) == 3
    assert shard.run(["ann"], 3 * TTL_MS, counts_of) == {"ann": 100}


@pytest.mark.all
@pytest.mark.slow(6)
def test_a_row_written_unread_has_an_entry_for_each_step_at_most(shard: OperatorShard) -> None:
    """Without a look-up nobody knows whether the index has the key."""
    for now in range(0, 3 * TTL_MS, 5):
        shard.run(["ann"], now, put(now))
        assert len(shard.stored("state.expiring")) <= TTL_MS // 8 + 1
    shard.run([], 5 * TTL_MS, lambda batch: None)
    assert shard.stored("state") == shard.stored("state.expiring") == []


def test_a_time_to_live_changed_there_and_back_leaves_nothing_behind(tmp_path: Path) -> None:
    """The index entry of the first one is not where the second one would have put it."""
    shard = OperatorShard(tmp_path, {"state": StateColumns(COUNT, 1023)}, "ProcessingTime")
    shard.run(["ann"], 5, refresh)
    shard.with_states({"state": StateColumns(COUNT, 1024)})
    shard.run(["ann"], 10, refresh)
    shard.with_states({"state": StateColumns(COUNT, 1023)})
    shard.run([], 1033, lambda batch: None)
    shard.run([], 5000, lambda batch: None)
    assert shard.stored("state") == shard.stored("state.expiring") == []


def test_the_function_is_not_called_only_to_evict(shard: OperatorShard) -> None:
    """It would get no row and no key, in a micro-batch that has none: what few functions expect."""
    shard.run(["ann"], 0, put(1))
    called: list[ShardBatch] = []
    shard.run([], 2 * TTL_MS, called.append)
    assert not called
    assert shard.stored("state") == []


def test_several_tables_live_for_times_of_their_own(tmp_path: Path) -> None:
    states = {"short": StateColumns(COUNT, 10), "long": StateColumns(COUNT, 100), "ever": StateColumns(COUNT, None)}
    shard = OperatorShard(tmp_path, states, "None")

    def put_all(batch: ShardBatch) -> None:
        for state in batch.states.values():
            state.put(n=[1])

    shard.run(["ann"], 0, put_all)
    for now, expected in ((50, ["long", "ever"]), (500, ["ever"])):
        shard.run(["ann"], now, lambda batch: None)
        assert [name for name in states if shard.stored(name)] == expected
    assert shard.earliest_ms is None, "without processing time Spark cannot be asked for a call"


def test_a_clock_that_is_put_back_loses_nothing(shard: OperatorShard) -> None:
    """Rows written meanwhile expire before the time until which was evicted already."""
    shard.run(["ann"], 5000, put(1))
    shard.run(["bob"], 100, put(2))
    assert shard.run(["ann", "bob"], 200, counts_of) == {"ann": 1, "bob": 2}
    shard.run([], 2000, lambda batch: None)
    assert [row["user"] for row in shard.stored("state")] == ["ann"]


def test_a_table_that_is_left_out_calls_no_shard(tmp_path: Path) -> None:
    """The time at which its rows expire was the shard's earliest, and passes for that of a timer."""
    kept = {"kept": StateColumns(COUNT, None)}
    shard = OperatorShard(tmp_path, {**kept, "state": StateColumns(COUNT, TTL_MS)}, "ProcessingTime")
    shard.run(["ann"], 0, lambda batch: batch.states["state"].put(n=[1]))
    assert shard.earliest_ms is not None
    shard.with_states(kept)
    shard.run([], shard.earliest_ms + 1, lambda batch: None)
    assert shard.earliest_ms is None


users = st.lists(st.sampled_from(["ann", "bob", "cem", None]), max_size=4)
actions = st.sampled_from(["put", "delete", "read"])
ttls = st.none() | st.integers(1, 300)
micro_batches = st.lists(st.tuples(users, st.integers(0, 90), actions, ttls), max_size=10)
FOR_EVER = 1 << 40


@pytest.mark.slow(1)
@given(micro_batches)
def test_state_does_as_a_dict_with_times_does(script: list[tuple[list[str | None], int, str, int | None]]) -> None:
    """Whatever is written, when, with any time to live, or none: nothing shows too long, goes early or stays behind."""
    with tempfile.TemporaryDirectory() as folder:
        shard = OperatorShard(Path(folder), {"state": StateColumns(COUNT, 1)}, "ProcessingTime")
        model: dict[str | None, tuple[int, int]] = {}
        now = 50
        for n, (rows, passes, action, ttl_ms) in enumerate(script):
            now += passes
            shard.with_states({"state": StateColumns(COUNT, ttl_ms)})

            until = FOR_EVER if ttl_ms is None else now + ttl_ms

            def step(batch: ShardBatch, action: str = action, now: int = now, until: int = until, n: int = n) -> None:
                seen = batch.keys.column("user").to_pylist()
                expected = {user: model[user][0] for user in seen if user in model and model[user][1] > now}
                assert counts_of(batch) == expected
                if action == "put":
                    batch.state.put(n=[n] * len(seen))
                    model.update(dict.fromkeys(seen, (n, until)))
                elif action == "delete":
                    batch.state.delete()
                    for user in seen:
                        model.pop(user, None)

            shard.run(rows, now, step)
        shard.run([], 10_000, lambda batch: None)
        stays = {user: n for user, (n, until) in model.items() if until == FOR_EVER}
        assert {row["user"]: row["n"] for row in shard.stored("state")} == stays
        assert shard.stored("state.expiring") == []
        assert shard.earliest_ms is None, "the shard would be called in every micro-batch"


ROWS = st.lists(st.tuples(st.sampled_from(["ann", "bob", None]), st.integers(1, 60)), max_size=6)
EVENTS = st.lists(
    st.tuples(ROWS, st.integers(0, 60)),
    min_size=1,
    max_size=6,
)  # fmt: skip


@given(EVENTS, st.sampled_from([1, 10, 25]))
def test_rows_expire_by_event_time(batches: list[tuple[list[tuple[str | None, int]], int]], ttl: int) -> None:
    time = pa.timestamp("us", "UTC")
    output = pa.schema([("user", pa.string()), ("seen", pa.bool_())])

    def step(batch: ShardBatch) -> dict[str, Any]:
        seen = batch.state.exists()
        batch.state.put(n=batch.groups.count())
        return {"seen": seen}

    states = {"state": StateColumns(COUNT, ttl, "EventTime")}
    function = ArrowWithState(step, KEY_TYPES, output, states, "EventTime", event_time="at")
    held: dict[str | None, int] = {}
    watermark = 0
    with tempfile.TemporaryDirectory() as folder:
        one = FunctionShard(Path(folder), function, ["user"])
        for rows, mark in batches:
            watermark = max(watermark, mark)
            at = {user: [ms for other, ms in rows if other == user] for user, _ in rows}
            expected = [(user, held.get(user, 0) > max(watermark, min(times))) for user, times in at.items()]
            held |= {user: max(times) + ttl for user, times in at.items()}
            users, times = [user for user, _ in rows], [1000 * ms for _, ms in rows]
            given_rows = pa.table({"user": pa.array(users, pa.string()), "at": pa.array(times, pa.int64()).cast(time)})
            found = [(row["user"], row["seen"]) for row in one.run(given_rows, watermark)]
            assert sorted(found, key=repr) == sorted(expected, key=repr)
            held = {user: expires for user, expires in held.items() if expires > watermark}
            assert {row["user"]: row["expires_ms"] for row in one.stored("state")} == held
            assert not held or one.earliest_ms <= min(held.values())  # type: ignore[operator]
