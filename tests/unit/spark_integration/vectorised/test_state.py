"""State and timers as vectorised functions see them, and that what is gone leaves nothing behind."""

from __future__ import annotations

import datetime as dt
import mmap
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.arrow import rows as arrow_rows
from holdfast.backends.base import Found
from holdfast.backends.registry import backend_names, find_backend
from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.timers import Timers
from holdfast.spark_integration.vectorised.arrays import shown_keys
from holdfast.spark_integration.vectorised.arrow_with_state import StateColumns
from holdfast.spark_integration.vectorised.batch import ShardBatch
from holdfast.spark_integration.vectorised.state import ShardState
from tests.tiers import LONG, repetitions
from tests.unit.spark_integration.embedded_shard import COUNT, OperatorShard, users_of


def too_much_text() -> pa.Array:
    """Return one value of 2 GiB, which takes no memory as long as nobody reads it."""
    size_bytes = (1 << 31) + 1
    offsets = pa.py_buffer(np.array([0, size_bytes], np.int64))
    return pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(mmap.mmap(-1, size_bytes)))


def test_a_column_that_arrow_cannot_hold_is_named() -> None:
    """Text has offsets of 32 bits; the error says what to do, where Arrow's says nothing."""
    text = too_much_text()
    found = Found(np.ones(1, np.bool_), pa.RecordBatch.from_arrays([pa.array([1]), text], names=["n", "note"]))

    class Rows:
        def get(self) -> Found:
            return found

    rows: Any = Rows()
    state = ShardState(rows, pa.schema([("n", pa.int64()), ("note", pa.string())]))
    with pytest.raises(InvalidArgumentError, match=r"'note' exceeds 2 GiB.*more shards.*keys=1 bytes=2147483"):
        state.get()


def test_keys_that_arrow_cannot_hold_are_named() -> None:
    """As state."""
    keys = Keys(np.zeros(1, np.uint64), pa.RecordBatch.from_arrays([too_much_text()], names=["user"]))
    with pytest.raises(InvalidArgumentError, match=r"key column 'user' exceeds 2 GiB.*more shards.*keys=1"):
        shown_keys(keys, pa.schema([("user", pa.string())]))


@pytest.mark.parametrize("where", [None, [True, True]])
def test_chunks_that_arrow_cannot_hold_together_are_put(monkeypatch: pytest.MonkeyPatch, where: object) -> None:
    """State is stored with offsets of 64 bits: what a function gives in chunks may pass 2 GiB, here 10 bytes."""
    monkeypatch.setattr(arrow_rows, "SMALL_OFFSETS_MAX", 10)
    kept: list[pa.Array] = []

    class Rows:
        def __len__(self) -> int:
            return 2

        def put(self, values: pa.Table, rows: object = None) -> None:
            kept.append(arrow_rows.one_chunk(values.column("note")))

    rows: Any = Rows()
    note = pa.chunked_array([["a" * 8], ["b" * 8]])
    ShardState(rows, pa.schema([("note", pa.string())])).put(pa.table({"note": note}), where=where)
    assert [(one.type, one.to_pylist()) for one in kept] == [(pa.large_string(), note.to_pylist())]


@pytest.mark.parametrize("where", [None, [True, False]])
def test_text_and_bytes_in_views_are_put(tmp_path: Path, where: object) -> None:
    """Other libraries hand Arrow their text so, such as polars; Arrow takes no rows of it."""
    types = pa.schema([("text", pa.string()), ("data", pa.binary()), ("names", pa.list_(pa.string()))])
    text, data = pa.array(["a", "b"], pa.string_view()), pa.array([b"a", b"b"], pa.binary_view())
    names = pa.ListArray.from_arrays([0, 1, 2], text)

    def step(batch: ShardBatch) -> list[dict[str, Any]]:
        batch.state.put(pa.table({"text": text, "data": data, "names": names}), where=where)
        return batch.state.get().filter(batch.state.exists()).to_pylist()

    found = OperatorShard(tmp_path / "shard", {STATE_TABLE: StateColumns(types, None)}, "None").run(["x", "y"], 0, step)
    wanted = [{"text": "a", "data": b"a", "names": ["a"]}, {"text": "b", "data": b"b", "names": ["b"]}]
    assert found == (wanted if where is None else wanted[:1])


def test_an_unknown_column_is_told_which_there_are(tmp_path: Path) -> None:
    """pyarrow says only that it does not exist; what is meant stands in the same error."""
    shard = OperatorShard(
        tmp_path, {STATE_TABLE: StateColumns(pa.schema([("n", pa.int64()), ("last", pa.string())]), None)}, "None"
    )
    with pytest.raises(KeyError, match="nn") as caught:
        shard.run(["a"], 0, lambda batch: batch.state.get()["nn"])
    assert caught.value.__notes__ == ["columns of the state: n, last; keys: user; rows: user, v; did you mean 'n'?"]
    with pytest.raises(KeyError, match="mine") as caught:
        shard.run(["a"], 0, lambda batch: {}["mine"])
    assert not hasattr(caught.value, "__notes__"), "the user's own KeyError is none of ours"


def test_an_unknown_table_is_told_which_there_are(tmp_path: Path) -> None:
    columns = StateColumns(pa.schema([("n", pa.int64())]), None)
    shard = OperatorShard(tmp_path, {"carts": columns, "seen": columns}, "None")
    with pytest.raises(KeyError, match="no state table 'cart'; it has carts, seen; did you mean 'carts'"):
        shard.run(["a"], 0, lambda batch: batch.states["cart"])


def test_a_default_stands_where_null_would(tmp_path: Path) -> None:
    """For keys without state, and where a stored value is null: in all columns, or in those that are named."""
    types = pa.schema([("n", pa.int64()), ("total", pa.float64()), ("tags", pa.list_(pa.string()))])
    shard = OperatorShard(tmp_path, {STATE_TABLE: StateColumns(types, None)}, "None")
    numbers = pa.table({"n": [None], "total": [2.5], "tags": [["a"]]}, schema=types)
    shard.run(["ann"], 1, lambda batch: batch.state.put(numbers))

    def step(batch: ShardBatch) -> dict[Any, Any]:
        found = batch.state.get(default={"n": 0, "tags": []})
        assert found.schema == types
        return dict(zip(batch.keys["user"].to_pylist(), found.to_pylist(), strict=True))

    found = shard.run(["bob", "ann"], 2, step)
    assert found == {"bob": {"n": 0, "total": None, "tags": []}, "ann": {"n": 0, "total": 2.5, "tags": ["a"]}}
    for default, text in (({"m": 0}, "unknown state column: 'm'"), (0, "does not fit state column 'tags'.*per column")):
        with pytest.raises(InvalidArgumentError, match=text):
            shard.run(["ann"], 3, lambda batch, default=default: batch.state.get(default))


FOR_EVER = {"state": StateColumns(COUNT, None)}


@pytest.fixture
def shard(tmp_path: Path) -> OperatorShard:
    return OperatorShard(tmp_path, FOR_EVER, "EventTime")


def set_all(*times: int | None) -> Any:
    return lambda batch: batch.timers.set(pa.array(times, pa.int64()))


def test_a_timer_that_is_due_brings_its_key_without_rows(shard: OperatorShard) -> None:
    """Its count is 0, its other reductions are null, and its state is there."""

    def first(batch: ShardBatch) -> None:
        batch.state.put(n=[5])
        batch.timers.set([100])

    def later(batch: ShardBatch) -> None:
        assert users_of(batch) == ["bob", "ann"], "first the keys that have rows"
        assert batch.groups.count().to_pylist() == [2, 0]
        assert batch.groups.count("v").to_pylist() == [2, 0]
        for reduced in (batch.groups.sum("v"), batch.groups.min("v"), batch.groups.max("v"), batch.groups.mean("v")):
            assert reduced.is_valid().to_pylist() == [True, False]
        assert batch.groups.first("v").to_pylist() == [0, None]
        assert batch.groups.last("v", order_by="v").to_pylist() == [1, None]
        assert len(batch.groups) == 2
        assert batch.groups.index.tolist() == [0, 0]
        assert batch.state.get()["n"].to_pylist() == [None, 5]
        assert batch.timers.due_ms.to_pylist() == [None, 100]

    shard.run(["ann"], 0, first)
    assert shard.earliest_ms == 100
    shard.run(["bob", "bob"], 101, later)
    assert shard.earliest_ms is None


def test_null_and_delete_remove_timers(shard: OperatorShard) -> None:
    shard.run(["ann", "bob", "cem"], 0, lambda batch: batch.timers.set([50] * 3))

    def remove(batch: ShardBatch) -> None:
        by_user = {"ann": None, "bob": 60}
        batch.timers.set([by_user[user] for user in users_of(batch)])  # type: ignore[index]

    shard.run(["ann", "bob"], 1, remove)
    shard.run(["cem"], 2, lambda batch: batch.timers.delete())
    assert shard.earliest_ms == 60
    assert shard.run([], 1000, users_of) == ["bob"]


def test_a_mask_chooses_keys(shard: OperatorShard) -> None:
    def some(batch: ShardBatch) -> None:
        batch.timers.set([10, 20], where=pc.equal(batch.keys["user"], "ann"))
        batch.timers.delete(where=pc.equal(batch.keys["user"], "bob"))

    shard.run(["ann", "bob"], 0, some)
    assert shard.run([], 1000, users_of) == ["ann"]


def test_timestamps_are_times_rounded_down(shard: OperatorShard) -> None:
    at = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=1_999)
    shard.run(["ann"], 0, lambda batch: batch.timers.set(pa.array([at], pa.timestamp("us", "Europe/Berlin"))))
    assert shard.earliest_ms == 1
    shard.run(["ann"], 0, lambda batch: batch.timers.set(pa.array([at.replace(tzinfo=None)], pa.timestamp("ns"))))
    assert shard.earliest_ms == 1


def test_a_timer_in_the_hour_that_a_clock_repeats_is_the_instant_given(shard: OperatorShard) -> None:
    """Rounding in local time would take the second 01:30 for the first."""
    second = dt.datetime(2013, 11, 3, 6, 30, tzinfo=dt.UTC)
    times = pa.array([second], pa.timestamp("us", "America/New_York"))
    shard.run(["ann"], 0, lambda batch: batch.timers.set(times))
    assert shard.earliest_ms == int(second.timestamp() * 1000)


@pytest.mark.parametrize(
    ("times", "expected_ms"),
    [
        (pd.Series([pd.NaT], dtype="datetime64[ns]"), None),
        ([None], None),
        (np.array(["NaT"], "datetime64[ms]"), None),
        (pa.array([3], pa.timestamp("s")), 3000),
        (np.array([0], np.uint8), 0),
        ([2**63 - 1], 2**63 - 1),
        (pa.chunked_array([[], [5]], pa.int32()), 5),
    ],
)
def test_times_come_in_many_forms(shard: OperatorShard, times: Any, expected_ms: int | None) -> None:
    """Null and NaT are no timer; 0 and the last millisecond there is are times as others are."""
    shard.run(["ann"], 0, lambda batch: batch.timers.set(times))
    assert shard.earliest_ms == expected_ms
    assert shard.run(["ann"], 0, lambda batch: batch.timers.get().to_pylist()) == [expected_ms]


def test_times_of_keys_that_are_not_chosen_are_not_looked_at(shard: OperatorShard) -> None:
    """What a function computes for them may be anything."""
    shard.run(["ann", "bob"], 0, lambda batch: batch.timers.set([-5, 7], where=[False, True]))
    assert shard.earliest_ms == 7


@pytest.mark.parametrize(
    ("times", "text"),
    [
        (["soon"], "must be timestamps or integers in milliseconds"),
        ([1.5], "must be timestamps or integers in milliseconds"),
        ([-1], "cannot be due before 1970"),
        (np.array([2**63], np.uint64), "must fit into 64 bits"),
        (pa.array([2**62], pa.timestamp("s")), "must fit into 64 bits"),
        (pa.array([-1], pa.timestamp("us")), "cannot be due before 1970"),
        ([dt.date(2020, 1, 1)], "must be timestamps or integers in milliseconds"),
        ([True], "must be timestamps or integers in milliseconds"),
        ([1, 2], "one value for each key"),
        (7, "must be an array"),
    ],
)
def test_what_is_no_time_is_refused(shard: OperatorShard, times: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        shard.run(["ann"], 0, lambda batch: batch.timers.set(times))
    assert shard.earliest_ms is None


def test_the_earliest_timer_is_sought_when_gone(shard: OperatorShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """To look costs as much as a look-up of all keys."""
    shard.run(["ann", "bob"], 0, set_all(100, 200))
    monkeypatch.setattr(Timers, "earliest", lambda *_: pytest.fail("looked for"))
    for later_ms, earliest_ms in ((300, 100), (50, 50)):
        shard.run(["bob"], 0, set_all(later_ms))
        assert shard.earliest_ms == earliest_ms
    monkeypatch.undo()
    shard.run(["bob"], 0, set_all(10**12))
    assert shard.earliest_ms == 100
    shard.run(["ann"], 0, set_all(None))
    assert shard.earliest_ms == 10**12


def test_an_operator_without_timers_says_how_to_have_them(tmp_path: Path) -> None:
    shard = OperatorShard(tmp_path, FOR_EVER, "None")
    with pytest.raises(InvalidArgumentError, match="timeMode='EventTime'"):
        shard.run(["ann"], 0, lambda batch: batch.timers.get())


users = st.lists(st.sampled_from(["ann", "bob", "cem", "", None]), max_size=4)
times = st.one_of(st.none(), st.integers(0, 60), st.integers(0, 2**60))
micro_batches = st.lists(st.tuples(users, st.integers(0, 20), st.lists(times, min_size=5, max_size=5)), max_size=8)


@pytest.mark.slow(1)
@given(micro_batches)
def test_timers_do_as_a_dict_of_them_does(script: list[tuple[list[str | None], int, list[int | None]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shard = OperatorShard(Path(folder), FOR_EVER, "ProcessingTime")
        model: dict[str | None, int] = {}
        now = 0
        for rows, passes, new in script:
            now += passes
            due = {user: at for user, at in model.items() if at < now}
            for user in due:
                del model[user]

            def step(batch: ShardBatch, due: Any = due, rows: Any = rows, new: Any = new) -> None:
                seen = users_of(batch)
                assert sorted(map(repr, seen)) == sorted(map(repr, set(rows) | set(due)))
                assert batch.timers.due_ms.to_pylist() == [due.get(user) for user in seen]
                assert batch.timers.get().to_pylist() == [model.get(user) for user in seen]
                batch.timers.set(pa.array(new[: len(seen)], pa.int64()))
                for user, at in zip(seen, new, strict=False):
                    model.pop(user, None)
                    if at is not None:
                        model[user] = at

            shard.run(rows, now, step)
            assert shard.earliest_ms == min(model.values(), default=None)
            assert {row["user"]: row["due_processing_ms"] for row in shard.stored("timers")} == model
            assert len(shard.stored("timers_by_due")) == len(model)


USERS, TTL_MS = 50, 5_000
MICRO_BATCHES = repetitions(120, 20_000)


def move(batch: ShardBatch) -> None:
    """Refresh each user's row, put its timer off, and delete that of every third one."""
    batch.state.put(n=pc.add(pc.coalesce(batch.state.get()["n"], 0), 1))
    has_rows = pc.greater(batch.groups.count(), 0)
    batch.timers.set([batch.processing_ms + 4_000] * batch.keys.num_rows, where=has_rows)
    batch.timers.delete(where=pa.array([user % 3 == 0 for user in map(int, batch.keys["user"].to_pylist())]))


@pytest.mark.all
@pytest.mark.slow(8)
@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.timeout(3600 if LONG else 300)
def test_the_state_is_as_large_as_what_lives(tmp_path: Path, backend: str) -> None:
    """However many micro-batches: rows stored in all runs, deletes included, and bytes."""
    states = {"state": StateColumns(COUNT, TTL_MS)}
    shard = OperatorShard(tmp_path, states, "ProcessingTime", find_backend(backend))
    with shard.backend:
        for n in MICRO_BATCHES:
            shard.run([str((n * 3 + i) % USERS) for i in range(5)], 100 * n, move)
            if n % 20 == 19:
                shard.maintain()
                found = shard.backend.statistics()
                assert sum(found.rows.values()) <= 4 * USERS * 4, "four tables, and some deletes"
                assert found.local_bytes < 2_000_000
        shard.run([], 100 * len(MICRO_BATCHES) + 2 * TTL_MS, lambda batch: None)
        for table in ("state", "state.expiring", "timers", "timers_by_due"):
            assert shard.stored(table) == []
        assert shard.earliest_ms is None
