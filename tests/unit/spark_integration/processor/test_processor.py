"""What a processor may declare, call, keep and return."""

from __future__ import annotations

import datetime as dt
import inspect
import math
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    ValueState,
)

from holdfast.errors import SchemaMismatchError
from holdfast.mvcc import Transaction
from holdfast.spark_integration.keyed import slabs
from holdfast.spark_integration.keyed.frames import FrameFormat
from holdfast.spark_integration.keyed.python_values import row_maker
from holdfast.spark_integration.processor import transform_with_state
from holdfast.spark_integration.processor.exchange import FrameExchange, OutputRows
from holdfast.spark_integration.processor.handle import ProcessorHandle
from holdfast.spark_integration.processor.state import states
from holdfast.spark_integration.processor.state.states import ProcessorListState, ProcessorMapState, ProcessorValueState
from tests.tiers import repetitions
from tests.time_zone import process_in
from tests.unit.spark_integration.processor.processor_shard import ProcessorShard, Scripted, columns

PAIR = T.StructType().add("a", T.LongType(), False).add("b", T.LongType())


@pytest.mark.parametrize(
    ("data_type", "good", "bad", "where"),
    [
        (T.LongType(), 1, None, "in column 'x'"),
        (PAIR, {"a": 1, "b": None}, {"a": None, "b": 1}, "inside column 'x', in 'a'"),
        (T.ArrayType(T.LongType(), False), [1], [1, None], "inside column 'x', in 'element'"),
        (T.MapType(T.StringType(), PAIR), {"k": None}, {"k": Row(a=None, b=1)}, "inside column 'x', in 'value': 'a'"),
    ],
)
def test_nulls_where_none_may_be(data_type: T.DataType, good: Any, bad: Any, where: str) -> None:
    output = OutputRows(T.StructType().add("x", data_type, not isinstance(data_type, T.LongType)), 10)
    for key, value in enumerate([good, bad, good]):
        assert not list(output.add_all([Row(x=value)], (key,)))
    with pytest.raises(SchemaMismatchError, match=f"the processor returned nulls {where}, which .* NOT NULL"):
        list(output.finish())
    assert output.failed_key == (1,)


def test_a_row_that_was_given_is_returned_as_one_of_sparks() -> None:
    """As a filter does; also with its columns in another order, and in a struct."""
    given = row_maker("a", "b")
    output = OutputRows(T.StructType().add("b", T.LongType()).add("a", T.LongType()).add("pair", PAIR), 10)
    rows = [
        given((1, 2)),
        row_maker("pair", "b", "a")((given((3, 4)), 2, 1)),
        row_maker("b", "a", "pair")((2, 1, None)),
    ]
    with pytest.raises(SchemaMismatchError, match="without a column"):
        list(output.add_all(rows[:1], (0,)))
    assert not list(output.add_all(rows[1:], (0,)))
    [batch] = output.finish()
    assert batch.to_pylist() == [{"b": 2, "a": 1, "pair": {"a": 3, "b": 4}}, {"b": 2, "a": 1, "pair": None}]


def test_a_row_with_fewer_values_than_names_lacks_a_column() -> None:
    output = OutputRows(T.StructType().add("a", T.LongType()).add("b", T.LongType()), 10)
    with pytest.raises(SchemaMismatchError, match=r"without a column.*missing=\['b'\]"):
        list(output.add_all([Row("a", "b")(1)], (0,)))


@pytest.mark.parametrize(
    ("data_type", "buffer", "fill", "expected"),
    [
        (T.BinaryType(), bytearray(1), lambda buffer, n: buffer.__setitem__(0, n), [b"\0", b"\1"]),
        (T.BinaryType(), memoryview(bytearray(1)), lambda buffer, n: buffer.__setitem__(0, n), [b"\0", b"\1"]),
        (T.ArrayType(T.LongType()), np.zeros(1, np.int64), lambda buffer, n: buffer.fill(n), [[0], [1]]),
    ],
)
def test_what_a_processor_fills_anew_for_each_key(data_type: T.DataType, buffer: Any, fill: Any, expected: Any) -> None:
    """Spark converts a key's rows before it calls the next key; here those of many keys are converted together."""
    output = OutputRows(T.StructType().add("x", data_type), 10)
    for key in range(2):
        fill(buffer, key)
        assert not list(output.add_all([Row(x=buffer)], (key,)))
    [batch] = output.finish()
    assert batch.column(0).to_pylist() == expected


CLASSES = [
    (StatefulProcessorHandle, ProcessorHandle),
    (ValueState, ProcessorValueState),
    (ListState, ProcessorListState),
    (MapState, ProcessorMapState),
]
METHODS = [
    pytest.param(ours, name, method, id=f"{of_spark.__name__}.{name}")
    for of_spark, ours in CLASSES
    for name, method in inspect.getmembers(of_spark, inspect.isfunction)
    if not name.startswith("_")
]


@pytest.mark.parametrize(("ours", "name", "of_spark"), METHODS)
def test_a7_a8_each_method_of_spark_is_ours(ours: type, name: str, of_spark: object) -> None:
    """A7, A8: one that a new version of Spark adds would else ask Spark's state server, which is not there."""
    assert name in vars(ours)
    assert list(inspect.signature(vars(ours)[name]).parameters) == list(inspect.signature(of_spark).parameters)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def first_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test see the warnings that a process gives once."""
    monkeypatch.setattr(transform_with_state, "_warned", set())


class Blameless(StatefulProcessor):
    """Changes nothing but what it may."""

    def __init__(self) -> None:
        self.limit = 5
        self.names = {"a": "ann"}
        self.model: Any = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.cache: dict[Any, Any] = {}
        self.seen: list[Any] = []
        self.names["b"] = "bob"
        self.model = object()

    @cached_property
    def table(self) -> list[int]:
        return [1, 2, 3]

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        self.cache[key] = self.table
        self.seen.append(key)
        self.limit = 5
        self.handle.registerTimer(10)
        return iter([])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.cache.clear()
        return iter([])

    def close(self) -> None:
        self.handle = None


class Counting(Blameless):
    """Counts in attributes: in a new one, in one that it has, and in a container that it came with."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.by_key: dict[Any, int] = {}

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        self.n += 1
        self.last = key
        self.by_key[key] = self.by_key.get(key, 0) + 1
        self.handle.registerTimer(10)
        return iter([])


class CountingTimers(Blameless):
    """Sets an attribute when a timer fires."""

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.model = key
        return iter([])


def test_what_is_no_state_may_change(tmp_path: Path) -> None:
    """Caches that init makes, lazy properties, equal values: the tests' settings make a warning an error."""
    shard = ProcessorShard(tmp_path, Blameless(), "ProcessingTime")
    shard.run(["a", "b"])
    shard.run([], now=20)


@pytest.mark.parametrize(
    ("processor", "changed"), [(Counting(), "n, last, by_key"), (CountingTimers(), "model")], ids=["rows", "timers"]
)
def test_state_in_attributes_warns_once(processor: StatefulProcessor, changed: str, tmp_path: Path) -> None:
    """The warning names class and attributes; a process gives it once, whatever becomes of the copies."""
    shard = ProcessorShard(tmp_path, processor, "ProcessingTime")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        shard.run(["a", "b"])
        shard.run(["a"], now=20)
        shard.run(["a"], now=40)
    [warning] = warned
    assert f"{type(processor).__name__} has changed its attributes" in str(warning.message)
    assert f"timers: {changed}. The changes will be lost" in str(warning.message)


def test_a_batch_query_does_not_warn(tmp_path: Path) -> None:
    shard = ProcessorShard(tmp_path, Counting(), "ProcessingTime")
    object.__setattr__(shard.function, "is_streaming", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard.run(["a"])


UTC = FrameFormat("UTC")


def returned(columns: dict[str, T.DataType], *calls: Any, fmt: FrameFormat = UTC) -> list[dict[str, Any]]:
    """Return the rows of what a processor returned in some calls."""
    schema = T.StructType()
    for name, data_type in columns.items():
        schema.add(name, data_type)
    output = FrameExchange(schema, fmt, 100).output()
    batches = [batch for i, frames in enumerate(calls) for batch in output.add_all(frames, (i,))]
    return [row for batch in [*batches, *output.finish()] for row in batch.to_pylist()]


def test_booleans_are_numbers_where_numbers_are_declared() -> None:
    frames = [pd.DataFrame({"n": [True, False]}), pd.DataFrame({"n": [7]})]
    assert returned({"n": T.LongType()}, frames) == [{"n": 1}, {"n": 0}, {"n": 7}]


def test_columns_go_by_position_if_the_session_says_so() -> None:
    """Whatever their names; ``spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName`` is off."""
    frames = [pd.DataFrame({"b": [1], "c": [2]})]
    by_position = FrameFormat("UTC", assign_cols_by_name=False)
    assert returned({"a": T.LongType(), "b": T.LongType()}, frames, fmt=by_position) == [{"a": 1, "b": 2}]


def test_columns_without_names_may_be_more_than_are_declared() -> None:
    more, fewer = pd.DataFrame([(1, 2, 3)]), pd.DataFrame([(1,)])
    assert returned({"a": T.LongType(), "b": T.LongType()}, [more]) == [{"a": 1, "b": 2}]
    with pytest.raises(SchemaMismatchError, match=r"fewer columns.*columns=1 declared=2"):
        returned({"a": T.LongType(), "b": T.LongType()}, [fewer])


N = columns(n=T.LongType())


def test_variables_may_have_any_names_and_columns_those_of_keys(tmp_path: Path) -> None:
    """Spark takes blanks, dots and slashes; a grouping column may be called as a column of ours."""

    def declare(handle: Any) -> Any:
        return [
            handle.getListState("a /b.ü", columns(key=T.LongType())),
            handle.getMapState("x", columns(key=T.LongType()), N),
        ]

    shard = ProcessorShard(tmp_path / "shard", Scripted(declare))
    shard.each(["k"], lambda states, *_: (states[0].appendValue((1,)), states[1].updateValue((2,), (3,)))[:0])
    seen = shard.each(["k"], lambda states, *_: (list(states[0].get()), list(states[1].iterator())))
    assert seen == {"k": repr(([(1,)], [((2,), (3,))]))}


@pytest.mark.parametrize(("deleted", "kept"), [("x", ("x.expiring", N)), ("x.expiring", ("x", N, 1000))])
def test_what_is_deleted_leaves_a_variable_of_a_similar_name(tmp_path: Path, deleted: str, kept: Any) -> None:
    """The index of one with a time to live is called as the variable, and `.expiring`: without it nothing expires."""

    def keeps(handle: Any) -> Any:
        return handle.getValueState(*kept)

    def deletes(handle: Any) -> Any:
        handle.deleteIfExists(deleted)
        return keeps(handle)

    shard = ProcessorShard(tmp_path / "shard", Scripted(keeps), "ProcessingTime")
    shard.each(["a"], lambda value, *_: value.update((1,)), 1)
    shard.restart(Scripted(deletes))
    assert shard.each(["a"], lambda value, *_: value.get(), 2) == {"a": "(1,)"}
    shard.each([], lambda *_: None, 5000)
    assert bool(shard.stored(f"v.{kept[0]}")) == (deleted == "x")


ENTRIES, KEYS = 20, [f"k{i}" for i in range(100)]


@pytest.fixture
def shard(tmp_path: Path) -> ProcessorShard:
    shard = ProcessorShard(tmp_path / "shard", Scripted(lambda handle: handle.getMapState("map", N, N)))

    def fill(entries: Any, key: Any, _: Any) -> None:
        for n in range(ENTRIES):
            entries.updateValue((n,), (n + 100 * int(key[0][1:]),))

    shard.each(KEYS, fill)
    return shard


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is read: calls, and whole keys that are looked up."""
    counts: Counter[str] = Counter()
    get, scan_prefix = Transaction.get, Transaction.scan_prefix

    def counted_get(self: Any, table: str, keys: Any) -> Any:
        counts.update({"get": 1, "rows": len(keys)})
        return get(self, table, keys)

    def counted_scan(self: Any, table: str, keys: Any) -> Any:
        counts.update({"scan": 1})
        return scan_prefix(self, table, keys)

    monkeypatch.setattr(Transaction, "get", counted_get)
    monkeypatch.setattr(Transaction, "scan_prefix", counted_scan)
    return counts


def test_one_of_twenty_entries_costs_one_row_a_key(shard: ProcessorShard, read: Counter[str]) -> None:
    """Not the twenty of its map, and not a look-up for each key."""
    seen = shard.each(KEYS, lambda entries, *_: (entries.getValue((7,)), entries.containsKey((99,))))
    assert seen == {key: repr((Row(n=7 + 100 * i), False)) for i, key in enumerate(KEYS)}
    assert read["scan"] == 0
    assert read["rows"] == 2 * len(KEYS)
    assert read["get"] < 10


def test_entries_that_differ_by_key_come_with_their_maps(shard: ProcessorShard, read: Counter[str]) -> None:
    """A few are looked up in vain, for a few keys each."""
    seen = shard.each(KEYS, lambda entries, key, _: entries.getValue((int(key[0][1:]) % ENTRIES,)))
    assert seen == {key: repr(Row(n=i % ENTRIES + 100 * i)) for i, key in enumerate(KEYS)}
    assert (read["get"], read["rows"]) == (4, 64)
    assert 0 < read["scan"] < 5


def test_maps_that_are_iterated_over_are_fetched_whole(shard: ProcessorShard, read: Counter[str]) -> None:
    shard.each(KEYS, lambda entries, *_: (len(list(entries.keys())), entries.getValue((7,)), entries.getValue((8,))))
    assert read["get"] == 0


@pytest.mark.parametrize("seed", repetitions(1, 100))
@pytest.mark.parametrize("slab_keys", [7, 20_000])
def test_whatever_a_processor_asks_it_gets_what_its_map_holds(
    shard: ProcessorShard, monkeypatch: pytest.MonkeyPatch, seed: int, slab_keys: int
) -> None:
    """Entries are read, written, removed, cleared and iterated over in any order, in keys that timers call again."""
    monkeypatch.setattr(slabs, "SLAB_KEYS", slab_keys)
    monkeypatch.setattr(states, "_FIRST_KEYS", 2)
    monkeypatch.setattr(states, "_GROWTH", 3)
    held = {key: {n: n + 100 * i for n in range(ENTRIES)} for i, key in enumerate(KEYS)}
    chance = random.Random(seed)
    # Most processors ask for few entries; each micro-batch is of another one.
    for _ in range(4):
        popular = chance.sample(range(ENTRIES + 2), chance.choice((1, 3, 4, 5, 20)))
        acts = ["get"] * chance.choice((3, 20)) + ["contains", "put", "remove", "clear", "iterate"]

        def act(entries: Any, key: Any, _: Any, popular: list[int] = popular, acts: list[str] = acts) -> None:
            mine = held[key[0]]
            for _ in range(chance.randrange(5)):
                n, what = chance.choice(popular), chance.choice(acts)
                if what == "get":
                    assert entries.getValue((n,)) == (None if n not in mine else Row(n=mine[n]))
                elif what == "contains":
                    assert entries.containsKey((n,)) == (n in mine)
                elif what == "put":
                    mine[n] = chance.randrange(1000)
                    entries.updateValue((n,), (mine[n],))
                elif what == "remove":
                    mine.pop(n, None)
                    entries.removeKey((n,))
                elif what == "clear":
                    mine.clear()
                    entries.clear()
                else:
                    assert {key[0]: value[0] for key, value in entries.iterator()} == mine

        shard.each(chance.choices(KEYS, k=60), act)
    seen = shard.each(KEYS, lambda entries, *_: sorted((key[0], value[0]) for key, value in entries.iterator()))
    assert seen == {key: repr(sorted(mine.items())) for key, mine in held.items()}


@pytest.fixture
def new_york() -> Iterator[None]:
    with process_in("America/New_York"):
        yield


def test_user_keys_are_equal_as_the_store_has_them(tmp_path: Path) -> None:
    """NaN is one key, -0.0 is 0.0, and lists can be keys; so it is before and after they were stored."""
    schema = columns(d=T.DoubleType(), items=T.ArrayType(T.StringType()))
    shard = ProcessorShard(tmp_path / "shard", Scripted(lambda h: h.getMapState("m", schema, N)))

    def count(state: Any, *_: Any) -> Any:
        for n, key in enumerate([(math.nan, ["x"]), (-math.nan, ["x"]), (0.0, None), (-0.0, None), (None, [])]):
            before = state.getValue(key)
            state.updateValue(key, ((before.n if before else 0) + 10 + n,))
        return sorted(state.values())

    assert shard.each(["a"], count) == {"a": repr([(14,), (21,), (25,)])}
    assert shard.each(["a"], count) == {"a": repr([(28,), (42,), (50,)])}
    assert len(shard.stored("m.m")) == 3


def test_times_of_an_hour_that_a_clock_repeats_are_different_user_keys(tmp_path: Path, new_york: None) -> None:
    """In the worker's zone both are half past one; Spark's map has an entry for each."""
    times = [(dt.datetime(2024, 11, 3, hour, 30, tzinfo=dt.UTC),) for hour in (5, 6)]
    shard = ProcessorShard(
        tmp_path / "shard", Scripted(lambda handle: handle.getMapState("at", columns(at=T.TimestampType()), N))
    )

    def write(at: Any, *_: Any) -> Any:
        for n, time_of_day in enumerate(times):
            at.updateValue(time_of_day, (n,))
        return read(at)

    def read(at: Any, *_: Any) -> Any:
        return [at.getValue(time_of_day).n for time_of_day in times], len(list(at.keys()))

    assert shard.each(["a"], write) == {"a": "([0, 1], 2)"}
    assert shard.each(["a"], read) == {"a": "([0, 1], 2)"}
    assert [row["entry.at"] for row in shard.stored("m.at")] == [at for (at,) in times]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_the_end_of_the_calendar_is_a_user_key(tmp_path: Path, zone: str) -> None:
    """It stands for "for ever"; in UTC it is, by the process's zone, beyond Python's calendar."""
    end = (dt.datetime(9999, 12, 31, 23, 59, 59, 999999),)  # noqa: DTZ001  naive ones are of the process's zone
    with process_in(zone):
        shard = ProcessorShard(
            tmp_path / "shard", Scripted(lambda handle: handle.getMapState("at", columns(at=T.TimestampType()), N))
        )

        def count(at: Any, *_: Any) -> Any:
            before = at.getValue(end)
            at.updateValue(end, ((before.n if before else 0) + 1,))
            return list(at.iterator())

        assert shard.each(["a"], count) == {"a": repr([(end, (1,))])}
        assert shard.each(["a"], count) == {"a": repr([(end, (2,))])}


def test_a_null_inside_of_a_user_key_where_none_may_be_names_its_key(tmp_path: Path) -> None:
    """Whatever stored keys may have."""
    part = T.StructType([T.StructField("n", T.LongType(), False)])
    shard = ProcessorShard(
        tmp_path / "shard", Scripted(lambda handle: handle.getMapState("m", columns(p=part, q=T.LongType()), N))
    )

    def write(entries: Any, key: Any, _: Any) -> None:
        entries.updateValue(((None,) if key[0] == "b" else (1,), None), (1,))

    words = "null inside column 'p', in 'n', which the key of map state 'm' declares NOT NULL"
    with pytest.raises(SchemaMismatchError, match=words) as caught:
        shard.each(["a", "b", "c"], write)
    assert "raised in operator 'op' for key ('b',)" in caught.value.__notes__
    assert shard.stored("m.m") == []
