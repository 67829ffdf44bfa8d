"""Timers and TTL of processors, what may be done when, and what may be declared over an earlier one's state."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from holdfast.backends.schema import TableSchema
from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.processor.handle import PickledProcessor, declaration_of
from holdfast.spark_integration.processor.transform_with_state import TransformWithState, require_same_grouping
from tests.unit.spark_integration.processor.processor_shard import ProcessorShard, Scripted, columns

N = columns(n=T.LongType())


def timers_shard(folder: Path, time_mode: Any = "EventTime") -> ProcessorShard:
    Scripted.expired = lambda states, key, handle, due_ms: list(handle.listTimers())  # type: ignore[assignment]
    return ProcessorShard(folder / "shard", Scripted(lambda handle: None), time_mode)


def register(*times: int) -> Any:
    def does(_: Any, __: Any, handle: Any) -> Any:
        for due_ms in times:
            handle.registerTimer(due_ms)
        return list(handle.listTimers())

    return does


def nothing(*_: Any) -> None:
    return None


def test_timers_fire_at_their_time_in_order_of_time(tmp_path: Path) -> None:
    """A timer is due when the clock shows its very time; several of one key fire one after the other."""
    shard = timers_shard(tmp_path)
    assert shard.each(["a", "b"], register(30, 10, 20)) == {"a": "[10, 20, 30]", "b": "[10, 20, 30]"}
    assert shard.earliest_ms == 10, "its host calls a shard at its very time"
    assert shard.each([], nothing, now=9) == {}
    assert list(shard.each([], nothing, now=20).items()) == [
        ("a@10", "[10, 20, 30]"), ("b@10", "[10, 20, 30]"), ("a@20", "[20, 30]"), ("b@20", "[20, 30]")
    ]  # fmt: skip
    assert shard.earliest_ms == 30
    assert shard.each(["a"], lambda _, __, handle: list(handle.listTimers()), now=20) == {"a": "[30]"}
    assert len(shard.each([], nothing, now=1000)) == 2
    assert shard.earliest_ms is None
    assert shard.stored("timers") == shard.stored("timers_by_due") == []


def test_a_key_given_twice_stands_twice_where_its_timer_fires_too(tmp_path: Path) -> None:
    """A processor that unpacks its keys does so wherever it gets one."""
    shard = timers_shard(tmp_path)
    shard.function = replace(shard.function, given_keys=[0, 0])
    seen: list[Any] = []

    def see(_: Any, key: Any, handle: Any, due_ms: int | None = None) -> None:
        seen.append(key)
        if due_ms is None:
            handle.registerTimer(10)

    Scripted.expired = see  # type: ignore[assignment]
    shard.each(["a"], see)
    shard.each([], nothing, now=10)
    assert seen == [("a", "a"), ("a", "a")]


def test_a_ttl_beyond_all_times_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at most 10,000 years"):
        declaration_of(PickledProcessor(Scripted(lambda h: h.getValueState("v", N, 1 << 62))), "ProcessingTime")


def test_the_order_of_declarations_does_not_matter(tmp_path: Path) -> None:
    """Whoever declares from a set may do so in another order in each process."""
    Scripted.turns = itertools.cycle(["ab", "ba"])

    def declare(handle: Any) -> Any:
        return {name: handle.getValueState(name, N) for name in next(Scripted.turns)}

    shard = ProcessorShard(tmp_path / "shard", Scripted(declare))
    shard.each(["k"], lambda states, *_: states["a"].update((1,)))
    assert shard.each(["k"], lambda states, *_: states["a"].get()) == {"k": "(1,)"}


def test_what_was_written_with_a_ttl_expires_without_it(tmp_path: Path) -> None:
    """An hour's code is not read again weeks later because the hour was dropped from the declaration."""

    def declare(ttl_ms: int | None) -> Any:
        return lambda handle: (
            handle.getValueState("v", N, ttl_ms),
            handle.getListState("l", N, ttl_ms),
            handle.getMapState("m", N, N, ttl_ms),
        )

    def see(states: Any, *_: Any) -> Any:
        value, elements, entries = states
        return value.get(), list(elements.get()), sorted(entries.iterator())

    def write(n: int) -> Any:
        def does(states: Any, *_: Any) -> Any:
            states[0].update((n,))
            states[1].appendValue((n,))
            states[2].updateValue((n,), (n,))

        return does

    shard = ProcessorShard(tmp_path / "shard", Scripted(declare(100)), "ProcessingTime")
    shard.each(["a", "b"], write(1), now=1000)
    shard.restart(Scripted(declare(None)))
    assert shard.each(["a"], see, now=1050) == {"a": repr(((1,), [(1,)], [((1,), (1,))]))}
    shard.each(["a"], write(2), now=1060)
    assert shard.each(["a"], see, now=1100) == {"a": repr(((2,), [(2,)], [((2,), (2,))]))}
    shard.run([], now=2000)
    for table in ("v.v", "l.l", "m.m"):
        assert [(row["key"], row["n"], row["expires_ms"]) for row in shard.stored(table)] == [("a", 2, None)]
        assert shard.stored(f"{table}.expiring") == []
    assert shard.earliest_ms is None


def test_a_processor_that_cannot_travel_is_refused() -> None:
    processor = Scripted(lambda handle: None)
    processor.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgumentError, match=r"the Scripted cannot be pickled.*in init"):
        PickledProcessor(processor)
    with pytest.raises(InvalidArgumentError, match="must be an instance"):
        PickledProcessor(Scripted)


def test_a_processor_that_tasks_lack_says_how_to_send_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the task's; a bare ModuleNotFoundError sends the user to correct the processor."""
    (tmp_path / "only_here.py").write_text(
        "from tests.unit.spark_integration.processor.processor_shard import Scripted\nclass Of(Scripted): pass\n"
    )
    with monkeypatch.context() as driver:
        driver.syspath_prepend(tmp_path)
        pickled = PickledProcessor(importlib.import_module("only_here").Of(nothing))
    monkeypatch.delitem(sys.modules, "only_here")
    with pytest.raises(InvalidArgumentError, match=r"the module only_here, which Spark's tasks cannot.*--py-files"):
        pickled.unpickled()


Declare = Callable[[StatefulProcessorHandle], Any]
COUNT, TEXT, FLAG = columns(n=T.LongType()), columns(note=T.StringType()), columns(b=T.BooleanType())
OTHER, BOTH = columns(m=T.LongType()), columns(n=T.LongType(), m=T.LongType())
EXPIRING = columns(n=T.LongType(), expires_ms=T.LongType())
CONFIGURATION = {"timeMode": "ProcessingTime", "outputMode": "update"}


@pytest.fixture
def stored(tmp_path: Any) -> Callable[..., tuple[StoredTables, TransformWithState]]:
    """Return a function that declares one thing after the other, and returns what is stored by then, and the last."""

    def declared(declares: Sequence[Declare]) -> tuple[StoredTables, TransformWithState]:
        steps = [step_of(declare, tmp_path) for declare in declares]
        tables = StoredTables.of_first_run(steps[0].tables())
        for step in steps[1:-1]:
            step.require_restartable(tables, CONFIGURATION)
            tables = tables.with_declared(step.tables())
        return tables, steps[-1]

    return declared


def step_of(declare: Declare, folder: Any) -> TransformWithState:
    processor: StatefulProcessor = Scripted(declare)
    return ProcessorShard(folder / "shard", processor, "ProcessingTime").function


def not_null(schema: T.StructType) -> T.StructType:
    return T.StructType([T.StructField(field.name, field.dataType, False) for field in schema])


def entries(key: T.StructType) -> Declare:
    return lambda handle: handle.getMapState("m", key, COUNT)


def value(schema: T.StructType, ttl_ms: int | None = None, name: str = "v") -> Declare:
    return lambda handle: handle.getValueState(name, schema, ttl_ms)


GOES: dict[str, list[Declare]] = {
    "a column for another one, in two restarts": [value(COUNT), value(FLAG), value(OTHER)],
    "a column for one of another type": [value(COUNT), value(columns(n2=T.StringType()))],
    "a field for another one, in two restarts": [value(columns(p=field)) for field in (COUNT, FLAG, OTHER)],
    "TTL, and none, and TTL": [value(COUNT, 5), value(COUNT), value(COUNT, 7)],
    "TTL for a column": [value(BOTH), value(COUNT, 5)],
    "a column that was NOT NULL before": [value(not_null(COUNT)), value(COUNT)],
    "a column that was always NOT NULL": [value(not_null(COUNT)), value(TEXT, name="w"), value(not_null(COUNT))],
    "a key that was always NOT NULL": [entries(not_null(TEXT)), entries(not_null(TEXT))],
    "what may be null inside of a map's key": [entries(columns(p=not_null(COUNT))), entries(columns(p=COUNT))],
    "what may not be null inside of a map's key": [entries(columns(p=COUNT)), entries(columns(p=not_null(COUNT)))],
    "a new variable that is NOT NULL": [value(TEXT, name="w"), value(not_null(COUNT))],
    "a name that is that of an index": [value(COUNT, 5, "x"), lambda handle: handle.getListState("x.expiring", COUNT)],
    "everything else": [value(COUNT), lambda handle: handle.getMapState("w", TEXT, COUNT)],
}
RENAMED, OURS = "p.n → p.m: a renamed field loses its values", "expires_ms: a user's column in one run and the time"
# Words of the error.
DOES_NOT: dict[str, tuple[list[Declare], str]] = {
    "renamed": (
        [value(COUNT), value(OTHER)],
        "to delete the values, pass stateChanges={'v': {'drop': ['n']}}; to keep them hidden",
    ),
    "renamed and widened": ([value(columns(n=T.IntegerType())), value(OTHER)], "{'v': {'rename': {'n': 'm'}}}"),
    "a field renamed": ([value(columns(p=T.ArrayType(field))) for field in (COUNT, OTHER)], RENAMED),
    "a field of a map's values renamed": (
        [value(columns(p=T.MapType(T.StringType(), field))) for field in (COUNT, OTHER)],
        RENAMED,
    ),
    "comes back narrower": (
        [value(COUNT), value(FLAG), value(columns(b=T.BooleanType(), n=T.IntegerType()))],
        "n: int64 → int32",
    ),
    "a column NOT NULL comes back": (
        [value(BOTH), value(COUNT), value(T.StructType([*COUNT, *not_null(OTHER)]))],
        "m: it is NOT NULL",
    ),
    "a column becomes NOT NULL": ([value(COUNT), value(not_null(COUNT))], "n: it is NOT NULL"),
    "a column that was not NOT NULL in between": (
        [value(not_null(COUNT), 5), value(COUNT, 5), value(not_null(COUNT), 5)],
        "n: it is NOT NULL",
    ),
    "a column that was absent in between": (
        [value(not_null(COUNT)), value(TEXT), value(T.StructType([*TEXT, *not_null(COUNT)]))],
        "n: it is NOT NULL",
    ),
    "a map's key becomes NOT NULL": ([entries(TEXT), entries(not_null(TEXT))], "entry.note: it is NOT NULL"),
    "TTL over a column of its name": ([value(EXPIRING), value(COUNT, 5)], OURS),
    "a column of its name over TTL": ([value(COUNT, 5), value(COUNT), value(EXPIRING)], OURS),
    "an index's name, which was a variable's": (
        [value(COUNT, None, "x.expiring"), lambda handle: handle.getListState("x.expiring", COUNT)],
        "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE",
    ),
    "an index's table": ([value(COUNT, 5, "x"), value(TEXT, None, "x.expiring")], "shares a table with an earlier"),
    "an index where a variable was": (
        [value(COUNT, None, "x.expiring"), value(COUNT, 5, "x")],
        "shares a table with an earlier",
    ),
}


@pytest.mark.parametrize("name", list(GOES))
def test_what_goes(name: str, stored: Callable[..., tuple[StoredTables, TransformWithState]]) -> None:
    tables, step = stored(GOES[name])
    step.require_restartable(tables, CONFIGURATION)
    assert tables.with_declared(step.tables()).declared == step.tables()


@pytest.mark.parametrize("name", list(DOES_NOT))
def test_what_does_not(name: str, stored: Callable[..., tuple[StoredTables, TransformWithState]]) -> None:
    declares, words = DOES_NOT[name]
    tables, step = stored(declares)
    with pytest.raises(SchemaMismatchError) as caught:
        step.require_restartable(tables, CONFIGURATION)
    assert words in str(caught.value)


@pytest.mark.parametrize("was_nullable", [True, False])
def test_what_may_be_null_inside_of_grouping_keys_may_change(was_nullable: bool) -> None:
    def grouped(is_nullable: bool) -> TableSchema:
        key = pa.schema([("k", pa.struct([pa.field("a", pa.int64(), is_nullable)]))])
        return TableSchema.of("v.v", key, pa.schema([("n", pa.int64())]))

    stored = StoredTables.of_first_run({"v.v": grouped(was_nullable)})
    require_same_grouping(stored, grouped(not was_nullable).key)


def test_state_of_another_api_is_refused(stored: Callable[..., tuple[StoredTables, TransformWithState]]) -> None:
    tables, step = stored([value(COUNT), value(TEXT)])
    with pytest.raises(SchemaMismatchError, match="by another kind of operator"):
        step.require_restartable(tables, {})


def test_a_variable_and_an_index_do_not_share_a_name(tmp_path: Any) -> None:
    def both(handle: StatefulProcessorHandle) -> None:
        handle.getValueState("x", COUNT, 5)
        handle.getValueState("x.expiring", COUNT)

    with pytest.raises(InvalidArgumentError, match="shares a table with another variable's index"):
        step_of(both, tmp_path)
