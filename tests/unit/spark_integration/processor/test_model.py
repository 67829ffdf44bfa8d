"""Random processors against plain dicts: whatever they do, in whatever slabs, the state does as Spark documents it."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StringType, StructType

from holdfast.spark_integration.keyed import slabs
from holdfast.spark_integration.processor.state import slab as slab_module
from holdfast.spark_integration.processor.state import timers
from tests.plain_states import PlainKey
from tests.tiers import cases
from tests.unit.spark_integration.processor.processor_shard import ProcessorShard, Scripted

N, KEY = StructType().add("n", LongType()), StructType().add("k", StringType()).add("l", LongType())


@dataclass
class States:
    """A processor's states, the model's or the real ones."""

    value: Any
    items: Any
    entries: Any
    handle: Any


Do = Callable[[Any], Any]
"""Does something with a key's state, the model's or the real one, and returns what it saw."""

_SOME_KEYS = [("a", 1), ("a", 2), ("b", 1), (None, None), ("", 0), ("zz", -(2**63))]


@dataclass(frozen=True)
class Operation:
    """A call of the API with its arguments; `n` and `key` serve where they are needed."""

    name: str
    n: int
    key: tuple[Any, ...]
    offset_ms: int

    def __call__(self, s: Any, now: int) -> Any:
        return _OPERATIONS[self.name](s, self, now)


def _beginning(iterator: Iterator[Any], act: Callable[[], Any]) -> Any:
    """Take the first of an iterator, act, and take the rest: what was acted is not seen."""
    first = list(itertools.islice(iterator, 1))
    act()
    return sorted(first + (list(iterator) if first else []), key=repr)


_OPERATIONS: dict[str, Callable[[Any, Operation, int], Any]] = {
    "value.get": lambda s, o, _: s.value.get(),
    "value.exists": lambda s, o, _: s.value.exists(),
    "value.update": lambda s, o, _: s.value.update((o.n,)),
    "value.clear": lambda s, o, _: s.value.clear(),
    "items.get": lambda s, o, _: list(s.items.get()),
    "items.exists": lambda s, o, _: s.items.exists(),
    "items.appendValue": lambda s, o, _: s.items.appendValue((o.n,)),
    "items.appendList": lambda s, o, _: s.items.appendList([(o.n,), (None,), (o.n + 1,)]),
    "items.put": lambda s, o, _: s.items.put([(o.n,), (-o.n,)]),
    "items.clear": lambda s, o, _: s.items.clear(),
    "items.get and append": lambda s, o, _: _beginning(iter(s.items.get()), lambda: s.items.appendValue((o.n,))),
    "items.get and clear": lambda s, o, _: _beginning(iter(s.items.get()), s.items.clear),
    "entries.getValue": lambda s, o, _: s.entries.getValue(o.key),
    "entries.containsKey": lambda s, o, _: s.entries.containsKey(o.key),
    "entries.updateValue": lambda s, o, _: s.entries.updateValue(o.key, (o.n,)),
    "entries.update all": lambda s, o, _: [s.entries.updateValue(key, (o.n,)) for key in _SOME_KEYS],
    "entries.removeKey": lambda s, o, _: s.entries.removeKey(o.key),
    "entries.clear": lambda s, o, _: s.entries.clear(),
    "entries.exists": lambda s, o, _: s.entries.exists(),
    "entries.keys": lambda s, o, _: sorted(s.entries.keys(), key=repr),
    "entries.values": lambda s, o, _: sorted(s.entries.values(), key=repr),
    "entries.iterator": lambda s, o, _: sorted(s.entries.iterator(), key=repr),
    "entries.iterator and remove": lambda s, o, _: _beginning(s.entries.iterator(), lambda: s.entries.removeKey(o.key)),
    "entries.iterator and clear": lambda s, o, _: _beginning(s.entries.iterator(), s.entries.clear),
    "timer.register": lambda s, o, now: s.handle.registerTimer(now + o.offset_ms),
    "timer.delete": lambda s, o, now: s.handle.deleteTimer(now + o.offset_ms),
    "timer.list": lambda s, o, now: list(s.handle.listTimers()),
}
_READS = ("get", "exists", "containsKey", "keys", "values", "iterator", "list", "getValue")


@dataclass
class Model:
    """All keys of a shard, and what was seen of them in a micro-batch."""

    declare: Callable[[Any], States]
    keys: dict[Any, States] = field(default_factory=dict)

    def key(self, name: Any, now: int) -> States:
        """Return a key's state at a time."""
        if name not in self.keys:
            self.keys[name] = self.declare(PlainKey())
        self.keys[name].handle.now_ms = now
        return self.keys[name]

    def due(self, now: int) -> list[tuple[int, Any]]:
        """Return the timers that are due, earliest first."""
        return sorted(((ms, name) for name, key in self.keys.items() for ms in key.handle.due if ms <= now), key=repr)


@dataclass(frozen=True)
class MicroBatch:
    """What happens in a micro-batch."""

    #: Time since the one before.
    passes_ms: int
    #: By key.
    rows: dict[str | None, list[Operation]]
    #: For each key whose timer fires.
    in_timers: list[Operation]
    #: Whether a first attempt is made, which fails with its last key.
    fails_first: bool
    restarts: bool


operations = st.builds(
    Operation,
    name=st.sampled_from(sorted(_OPERATIONS)),
    n=st.integers(0, 9),
    key=st.sampled_from(_SOME_KEYS),
    offset_ms=st.sampled_from([-5000, -1, 0, 1, 3, 10, 40]),
)
keys = st.sampled_from([None, "", *"abcdefgh"])
micro_batches = st.builds(
    MicroBatch,
    passes_ms=st.integers(1, 20),
    rows=st.dictionaries(keys, st.lists(operations, max_size=6), max_size=7),
    in_timers=st.lists(operations, max_size=3),
    fails_first=st.integers(0, 5).map(lambda n: n == 0),
    restarts=st.integers(0, 4).map(lambda n: n == 0),
)


class Run:
    """A shard and its model, side by side."""

    def __init__(self, folder: Path, time_mode: Any, ttl_ms: int | None) -> None:
        def declare(handle: Any) -> States:
            return States(
                handle.getValueState("value", N, ttl_ms),
                handle.getListState("items", N, ttl_ms),
                handle.getMapState("entries", KEY, N, ttl_ms),
                handle,
            )

        self.processor = Scripted(declare)
        self.shard = ProcessorShard(folder, self.processor, time_mode)
        self.model = Model(declare)
        self.now = 0

    def play(self, batch: MicroBatch) -> None:
        """Run a micro-batch on both, and compare what each operation saw."""
        self.now += batch.passes_ms
        if batch.restarts:
            self.shard.restart(self.processor)
        earliest_ms = self.shard.earliest_ms
        if not batch.rows and (earliest_ms is None or earliest_ms > self.now):
            assert not self.model.due(self.now), "Spark would not call the shard"
            return
        if batch.fails_first and batch.rows:
            before = copy.deepcopy(self.model)
            with pytest.raises(LookupError):
                self._attempt(batch, fails=True)
            self.model = before
        fired = self._attempt(batch, fails=False)
        assert fired == self._fired

    def _attempt(self, batch: MicroBatch, *, fails: bool) -> list[int]:
        left, fired = set(batch.rows), []
        self._fired: list[int] = []
        self._waiting: list[tuple[int, Any]] | None = None

        def rows(states: States, key: Any, _: Any) -> None:
            self._compare(batch.rows[key[0]], states, key[0])
            left.discard(key[0])
            if fails and not left:
                raise LookupError

        def expired(states: States, key: Any, _: Any, due_ms: int) -> None:
            if self._waiting is None:
                self._waiting = self.model.due(self.now)
                self._fired = sorted(ms for ms, _ in self._waiting)
            assert (due_ms, key[0]) in self._waiting
            fired.append(due_ms)
            self._compare(batch.in_timers, states, key[0])
            self.model.key(key[0], self.now).handle.deleteTimer(due_ms)

        Scripted.rows, Scripted.expired = rows, expired  # type: ignore[assignment]
        self.shard.run(list(batch.rows), self.now)
        if self._waiting is None:
            assert not self.model.due(self.now), "due, and none fired"
        return fired

    def _compare(self, operations: list[Operation], states: States, name: Any) -> None:
        model = self.model.key(name, self.now)
        for operation in operations:
            expected, found = operation(model, self.now), operation(states, self.now)
            assert found == expected, (name, operation)


_MODES = [("ProcessingTime", None), ("ProcessingTime", 30), ("ProcessingTime", 500), ("EventTime", None)]
# Keys and bytes: all at once, or a few at a time, and lists and maps piece by piece.
_SLABS = [(20_000, 32 << 20), (3, 100)]
CASES = cases([(*mode, slab) for mode in _MODES for slab in _SLABS], quick=2)


@pytest.mark.slow
@pytest.mark.parametrize(("time_mode", "ttl_ms", "slab"), CASES)
def test_a_processor_does_as_dicts_do(
    time_mode: str, ttl_ms: int | None, slab: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads see writes, timers and TTL go by the clock, failed attempts leave nothing, and restarts lose nothing."""
    for module in (slabs, timers, slab_module):
        monkeypatch.setattr(module, "SLAB_KEYS", slab[0])
    monkeypatch.setattr(slab_module, "SLAB_BYTES", slab[1])

    @given(st.lists(micro_batches, max_size=8))
    def check(script: list[MicroBatch]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(Path(folder), time_mode, ttl_ms)
            for batch in script:
                run.play(batch)
            # At the end all is read once more.
            reads = [Operation(name, 0, _SOME_KEYS[0], 0) for name in _OPERATIONS if name.split(".")[1] in _READS]
            run.play(MicroBatch(1, dict.fromkeys(run.model.keys or ["a"], reads), [], False, False))
            if ttl_ms is not None:
                run.play(MicroBatch(10_000, {}, [], False, False))
                for table in ("v.value", "l.items", "m.entries"):
                    assert run.shard.stored(table) == [], "what has expired is removed"

    check()
