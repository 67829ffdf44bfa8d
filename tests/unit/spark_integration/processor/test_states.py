"""State of a processor: what it reads is what it wrote, whatever was fetched together and however much there is."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, FloatType, IntegerType, LongType, StringType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration import timers as shared_timers
from holdfast.spark_integration.keyed import slabs
from holdfast.spark_integration.keyed.python_values import RowValues
from holdfast.spark_integration.processor.state import slab as slab_module
from holdfast.spark_integration.processor.state import states as states_module
from tests.faults.elsewhere import finish, run_elsewhere
from tests.tiers import ALL, cases
from tests.unit.spark_integration.processor.processor_shard import ProcessorShard, Scripted, columns

N = columns(n=LongType())


def declare_all(handle: Any) -> tuple[Any, Any, Any]:
    return (
        handle.getValueState("value", N),
        handle.getListState("list", N),
        handle.getMapState("map", N, columns(n=LongType(), text=StringType())),
    )


@pytest.fixture
def shard(tmp_path: Path) -> ProcessorShard:
    return ProcessorShard(tmp_path / "shard", Scripted(declare_all))


def everything(states: Any, *_: Any) -> Any:
    """What a key has."""
    value, elements, entries = states
    return value.get(), list(elements.get()), dict(entries.iterator())


@pytest.mark.all
@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", ["list", "map"])
def test_what_was_fetched_for_keys_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A slab has up to 20,000 keys: all of their lists or maps at once may be more than a worker's memory."""
    monkeypatch.setattr(slab_module, "SLAB_BYTES", 1 << 20)
    text = columns(text=StringType())

    def declare(handle: Any) -> Any:
        return handle.getListState("s", text) if kind == "list" else handle.getMapState("s", N, text)

    def write(state: Any, *_: Any) -> None:
        value = ("x" * 100_000,)
        _ = state.appendValue(value) if kind == "list" else state.updateValue((1,), value)

    shard = ProcessorShard(tmp_path / "shard", Scripted(declare))
    keys = [f"k{i}" for i in range(200)]
    for some in range(0, len(keys), 10):
        shard.each(keys[some : some + 10], write)
    tracemalloc.start()
    try:
        seen = shard.each(keys, lambda state, *_: state.exists())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(seen.values()) == {"True"}
    assert peak_bytes < 5 << 20, "all of it is 20 MB"


@pytest.mark.parametrize("kind", cases(["list", "map", "value"]))
def test_large_state_is_read_and_written_a_few_keys_at_a_time(tmp_path: Path, kind: str) -> None:
    """What keys have read and written is kept until their slab ends: of 20,000 with 100 kB each, no worker holds it."""
    # In a process without threads of other tests, whose memory would count.
    finish(run_elsewhere(_use_large_state, tmp_path / "shard", kind))


def _use_large_state(directory: Path, kind: str) -> None:
    text = columns(text=StringType())

    def declare(handle: Any) -> Any:
        if kind == "value":
            return handle.getValueState("s", text)
        return handle.getListState("s", text) if kind == "list" else handle.getMapState("s", N, text)

    def write(state: Any, key: Any, _: Any) -> Any:
        before = state.exists()
        value = (key[0][1] * 100_000,)
        if kind == "map":
            state.updateValue((1,), value)
        else:
            _ = state.put([value]) if kind == "list" else state.update(value)
        return before

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_timers, "AT_ONCE_BYTES", 1 << 20)
        patched.setattr(shared_timers.KeysAtOnce.__init__, "__defaults__", (4,))
        slabs.at_once_of.cache_clear()
        shard = ProcessorShard(directory, Scripted(declare))
        keys = [f"k{i}" for i in range(200 if ALL else 100)]
        for before in ("False", "True"):
            tracemalloc.start()
            seen = shard.each(keys, write)
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert set(seen.values()) == {before}
            assert peak_bytes < 5 << 20, "all of it is 10 MB, or 20"


@pytest.mark.parametrize("kind", ["list", "map"])
def test_keys_called_in_turns_bring_no_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """After a pause several timers of each key are due: 32 MiB for each call of one would take hours."""
    monkeypatch.setattr(slab_module, "SLAB_BYTES", 10_000)
    text = columns(text=StringType())
    fetch, fetched = slab_module.SlabEntries.fetch, []

    def counted(windows: slab_module.SlabEntries, at: int) -> slab_module.FetchedKeys | None:
        fetched.append(at)
        return fetch(windows, at)

    monkeypatch.setattr(slab_module.SlabEntries, "fetch", counted)

    def declare(handle: Any) -> Any:
        return handle.getListState("s", text) if kind == "list" else handle.getMapState("s", N, text)

    def add(state: Any, number: int, value: str) -> None:
        _ = state.appendValue((value,)) if kind == "list" else state.updateValue((number,), (value,))

    def write(state: Any, key: Any, handle: Any) -> None:
        n = int(key[0])
        handle.registerTimer(100 + n)
        handle.registerTimer(200 + 17 * n % 40)
        if n:  # that of 0 is empty
            add(state, n, "x" * 1000)

    def expire(state: Any, _: Any, __: Any, due_ms: int) -> Any:
        seen = sorted(len(value) for (value,) in (state.get() if kind == "list" else state.values()))
        add(state, due_ms, "y")
        return seen

    shard = ProcessorShard(tmp_path / "shard", Scripted(declare), "EventTime")
    shard.each([str(n) for n in range(40)], write)
    Scripted.expired = expire  # type: ignore[assignment]
    seen = shard.each([], expire, now=1000)
    assert {key: shown for key, shown in seen.items() if key.startswith("0@")} == {"0@100": "[]", "0@200": "[1]"}
    for n in range(1, 40):
        assert (seen[f"{n}@{100 + n}"], seen[f"{n}@{200 + 17 * n % 40}"]) == ("[1000]", "[1, 1000]")
    assert len(fetched) < 20, "of 80 calls"


@pytest.mark.slow(1)
@pytest.mark.parametrize("slab_keys", [1, 2, 20_000])
@pytest.mark.parametrize("limit_bytes", cases([300, 1, 32 << 20]))
def test_how_much_is_fetched_at_once_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab_keys: int, limit_bytes: int
) -> None:
    """Slabs of few keys, windows of a slab, and single lists and maps that are too large to fetch."""
    monkeypatch.setattr(slabs, "SLAB_KEYS", slab_keys)
    monkeypatch.setattr(states_module, "_READ_AT_ONCE", 3)
    monkeypatch.setattr(slab_module, "SLAB_BYTES", limit_bytes)
    shard = ProcessorShard(tmp_path / "shard", Scripted(declare_all))
    keys = [f"k{i}" for i in range(9)]

    def write(states: Any, key: Any, _: Any) -> None:
        size = int(key[0][1:]) ** 2
        states[1].appendList([(n,) for n in range(size + 1)])
        for n in range(size):
            states[2].updateValue((n,), (n, str(n)))

    def change(states: Any, key: Any, _: Any) -> Any:
        _, elements, entries = states
        seen = list(elements.get()), dict(entries.iterator()), entries.getValue((3,)), entries.containsKey((99,))
        entries.removeKey((0,))
        entries.updateValue((3,), (-3, None))
        elements.appendValue((-1,))
        return seen, elements.exists(), entries.exists(), entries.getValue((3,)), sorted(entries.keys())

    shard.each(keys, write)
    seen = shard.each(keys, change)
    for i, key in enumerate(keys):
        size = i**2
        third = Row(n=3, text="3") if size > 3 else None
        assert seen[key] == repr(
            (
                ([(n,) for n in range(size + 1)], {(n,): (n, str(n)) for n in range(size)}, third, False),
                True,
                True,
                Row(n=-3, text=None),
                sorted({(n,) for n in range(1, size)} | {(3,)}),
            )
        )
    after = shard.each(keys, lambda states, *_: (list(states[1].get())[-1], states[2].getValue((0,))))
    assert set(after.values()) == {repr(((-1,), None))}


def test_what_a_processor_does_to_what_it_gave_or_got_changes_nothing(tmp_path: Path) -> None:
    """Lists inside of rows are copied on their way in and out."""
    schema = columns(items=ArrayType(LongType()))
    shard = ProcessorShard(
        tmp_path / "shard", Scripted(lambda h: (h.getValueState("v", schema), h.getListState("l", schema)))
    )

    def change(states: Any, *_: Any) -> Any:
        value, elements = states
        given = [1, 2]
        value.update((given,))
        elements.put([(given,)])
        given.append(3)
        value.get()[0].append(4)
        next(elements.get())[0].append(5)
        return value.get(), list(elements.get())

    def change_what_was_read(states: Any, *_: Any) -> Any:
        states[0].get()[0].append(6)
        next(states[1].get())[0].append(7)
        return states[0].get(), list(states[1].get())

    expected = repr((([1, 2],), [([1, 2],)]))
    assert shard.each(["a"], change) == {"a": expected}
    assert shard.each(["a"], change_what_was_read) == {"a": expected}


def test_rows_from_state_have_their_names_in_a_list(tmp_path: Path) -> None:
    """As Spark makes them of a schema: a function may compare ``row.__fields__`` with a list."""
    schema = columns(inner=columns(x=LongType()))

    def declare(handle: Any) -> tuple[Any, Any]:
        return handle.getValueState("v", schema), handle.getMapState("m", N, schema)

    def write(states: Any, _: Any, handle: Any) -> None:
        states[0].update((Row(x=1),))
        states[1].updateValue((1,), (Row(x=2),))
        handle.registerTimer(5)

    def names(states: Any, *_: Any) -> Any:
        (inner,), entry = states[0].get(), states[1].getValue((1,))
        return inner.__fields__, entry.__fields__, entry.inner.__fields__

    shard = ProcessorShard(tmp_path / "shard", Scripted(declare), "EventTime")
    shard.each(["a"], write)
    assert shard.each(["a"], names) == {"a": repr((["x"], ["inner"], ["x"]))}
    Scripted.expired = lambda _, key, *__: key.__fields__  # type: ignore[assignment]
    assert shard.each([], names, now=10) == {"a@5": repr(["key"])}


def test_an_unwritten_value_reads_as_the_store_will_give_it(tmp_path: Path) -> None:
    """A float column keeps 32 bits, at once and later."""
    schema = columns(f=FloatType(), n=IntegerType())
    shard = ProcessorShard(tmp_path / "shard", Scripted(lambda h: h.getValueState("v", schema)))

    def write(state: Any, *_: Any) -> Any:
        state.update((1.1, None))
        return state.get()

    first = shard.each(["a"], write)
    assert first == shard.each(["a"], lambda state, *_: state.get()) == {"a": repr((1.100000023841858, None))}


def test_state_is_for_the_thread_that_calls_the_processor(shard: ProcessorShard) -> None:
    """Another thread could not know whose state it reads; on Spark it has that of whatever key is current (L11)."""

    def from_a_thread(states: Any, *_: Any) -> Any:
        caught: list[str] = []

        def use() -> None:
            try:
                states[0].get()
            except InvalidArgumentError as exc:
                caught.append(str(exc))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        return len(caught), "thread that the processor started" in caught[0]

    assert shard.each(["a"], from_a_thread) == {"a": repr((1, True))}


def test_what_is_not_touched_costs_nothing(shard: ProcessorShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable costs nothing where it is not used; a list is appended to and a map (M7) written without a read."""
    from holdfast.mvcc import Transaction

    asked: list[str] = []
    for name in ("get", "scan_prefix", "put", "delete"):
        method = getattr(Transaction, name)

        def told(self: Any, table: str, *args: Any, name: str = name, method: Any = method) -> Any:
            asked.append(f"{name} {table}")
            return method(self, table, *args)

        monkeypatch.setattr(Transaction, name, told)
    shard.each(["a", "b"], lambda states, *_: states[1].appendValue((1,)))
    assert asked == ["put l.list"]
    asked.clear()
    shard.each(["a", "b"], lambda states, *_: (states[0].get(), states[2].removeKey((1,)))[:0])
    assert sorted(asked) == ["delete m.map", "get v.value"]


_USES: dict[str, list[Callable[[Any], Any]]] = {
    "value": [lambda s: s.exists(), lambda s: s.get(), lambda s: s.update((1,)), lambda s: s.clear()],
    "list": [lambda s: s.exists(), lambda s: list(s.get()), lambda s: s.appendValue((1,)), lambda s: s.put([(1,)])],
    "map": [lambda s: s.exists(), lambda s: list(s.keys()), lambda s: s.getValue((1,)), lambda s: s.removeKey((1,))],
}


@pytest.mark.parametrize(("at", "name"), list(enumerate(_USES)))
def test_what_was_declared_and_then_deleted_cannot_be_used(at: int, name: str, tmp_path: Path) -> None:
    """D7: each use is an error, which a processor may catch, and stores nothing; its values are gone."""

    def declare(handle: Any) -> tuple[Any, Any, Any]:
        states = declare_all(handle)
        handle.deleteIfExists(name)
        return states

    def fill(states: Any, *_: Any) -> None:
        value, elements, entries = states
        value.update((1,))
        elements.appendValue((1,))
        entries.updateValue((1,), (1, "x"))

    def use(states: Any, *_: Any) -> None:
        for call in _USES[name]:
            with pytest.raises(PySparkRuntimeError, match=r"^Error .*_MISSING_COLUMN_FAMILY.* deleted"):
                call(states[at])

    shard = ProcessorShard(tmp_path / "shard", Scripted(declare_all))
    shard.each(["a"], fill)
    shard.restart(Scripted(declare))
    shard.each(["a"], use)
    shard.restart(Scripted(declare_all))
    left = [(1,), [(1,)], {(1,): (1, "x")}]
    left[at] = [None, [], {}][at]
    assert shard.each(["a"], everything) == {"a": repr(tuple(left))}


def test_a_read_that_failed_gives_no_other_keys_value(shard: ProcessorShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor may catch the error and ask again: values that were fetched for earlier keys are not this one's."""
    monkeypatch.setattr(slabs, "SLAB_KEYS", 1)
    shard.each(["a", "b"], lambda states, key, _: states[0].update((ord(key[0]),)))
    convert = RowValues.to_tuples
    failing = iter([False, True, False])

    def may_fail(self: RowValues, rows: Any) -> Any:
        if next(failing):
            raise InvalidArgumentError("text that is not UTF-8")
        return convert(self, rows)

    def asks_again(states: Any, *_: Any) -> Any:
        try:
            return states[0].get()
        except InvalidArgumentError:
            return "failed", states[0].get()

    monkeypatch.setattr(RowValues, "to_tuples", may_fail)
    assert shard.each(["a", "b"], asks_again) == {"a": repr((97,)), "b": repr(("failed", (98,)))}
