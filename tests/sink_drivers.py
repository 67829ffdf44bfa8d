"""Drivers of one query and one sink, of which any may stand still between any two of its requests.

Spark is a number that drivers share, as they share a checkpoint location: the newest micro-batch that was ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast import clock
from holdfast.errors import ConflictError, HoldfastError
from holdfast.snapshotter.ownership.query_origin import QueryOrigin, declare_origin
from holdfast.snapshotter.savepoints.manifest import PlannedBatch, SavedQuery, continue_sinks, sinks_of
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery, TwoPhaseSink
from tests.model.sink_target import CrashingStorage, Killed
from tests.model.turns import Actor, Turns

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

SCHEMA = pa.schema({"row": pa.string()})
BATCHES = 3
PARTS = 2


class World(ABC):
    """What all drivers of a query share: the state directory, the target, and Spark's log of ended micro-batches."""

    #: The number in rows of the query's micro-batch 0: a restored query goes on after the saved one, with numbers anew.
    first = 0

    def __init__(self, storage: ObjectStorage, query: SinkQuery) -> None:
        self.storage, self.query = storage, query
        self.ended = -1
        #: By micro-batch what each attempt at it prepared to be shown.
        self.attempts: dict[int, list[set[str]]] = {}

    @abstractmethod
    def sink(self, turns: Turns) -> TwoPhaseSink:
        """Return the sink as a driver uses it."""

    @abstractmethod
    def prepare(self, sink: TwoPhaseSink, turns: Turns, batch_id: int, part: int, row: str) -> Handle:
        """Write and prepare a part of one row."""

    @abstractmethod
    def shown(self) -> Sequence[str]:
        """Return the rows that a reader sees."""

    @abstractmethod
    def left(self) -> Sequence[object]:
        """Return what is prepared and neither visible nor given up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None) -> None:
        self.storage.close()


class Driver(Actor):
    """One driver: it starts where Spark's log says, and runs a few micro-batches."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        super().__init__(self._micro_batches, name)

    def _micro_batches(self, turns: Turns) -> None:
        world = self.world
        with turns.around():
            first = world.ended + 1
        sink = world.sink(turns)
        coordinator = Coordinator(sink, world.query, CrashingStorage(world.storage, turns), retained=3)
        coordinator.start(first, SCHEMA)
        for batch_id in range(first, first + BATCHES):
            if not coordinator.is_decided(batch_id):
                number = world.first + batch_id
                rows = [f"{number}-{self.name}-{part}" for part in range(PARTS)]
                world.attempts.setdefault(number, []).append(set(rows))
                try:
                    handles = [world.prepare(sink, turns, batch_id, part, row) for part, row in enumerate(rows)]
                except HoldfastError:
                    coordinator.give_up()
                    raise
                coordinator.finish(batch_id, Prepared(tuple(handles), PARTS))
            with turns.around():
                world.ended = max(world.ended, batch_id)


def judge(world: World, *drivers: Driver) -> None:
    """Whoever lost says so; a later start goes on; and readers have seen each micro-batch once, of one attempt."""
    for driver in drivers:
        if driver.error is not None and not isinstance(driver.error, (ConflictError, Killed)):
            raise AssertionError(f"{driver.name} ended otherwise than as the loser") from driver.error
    assert not drivers or any(driver.error is None or isinstance(driver.error, Killed) for driver in drivers)
    last = Driver(world, "last")
    last.go()
    if last.error is not None:
        raise AssertionError("the next start does not go on") from last.error
    assert not world.left(), f"left half-done: {world.left()}"
    rows: dict[int, list[str]] = {}
    for row in world.shown():
        rows.setdefault(int(row.partition("-")[0]), []).append(row)
    assert sorted(rows) == list(range(world.first + world.ended + 1)), "each micro-batch is shown"
    for batch_id, shown in rows.items():
        assert len(set(shown)) == len(shown), f"twice: {shown}"
        assert set(shown) in world.attempts[batch_id], f"not of one attempt: {shown}"


def stand_still_anywhere(make: Callable[[], World], *, first_every: int, second_every: int) -> None:
    """One stands still before any of its requests, another one starts and stands still, and the first one wakes."""
    steps = length(make())
    for first in range(0, steps, first_every):
        for second in range(1, steps, second_every):
            with make() as world:
                one = Driver(world, "one")
                one.go(first)
                other = Driver(world, "other")
                other.go(second)
                one.go()
                other.go()
                judge(world, one, other)


def length(world: World) -> int:
    """Return how many requests a driver makes that is alone."""
    with world:
        alone = Driver(world, "alone")
        alone.go()
        assert alone.error is None, repr(alone.error)
        return alone.steps


def saved(world: World) -> SavedQuery:
    """Save the query after what Spark has ended, as `savepoints.create` does; Spark has planned the next one."""
    query_id, planned = world.query.query_id, PlannedBatch("v1", "{}", ())
    return SavedQuery(query_id, world.ended, "v1", "{}", 0, (), planned, sinks_of(world.storage, query_id))


def restored(world: World, query: SavedQuery, query_id: str = "restored") -> World:
    """Let a restored query continue the sink; return its world: Spark's log is its own, all else is both queries'."""
    declare_origin(world.storage, QueryOrigin(query_id, query_id, query.query_id, query.batch_id, {}))
    continue_sinks(world.storage, query, query_id, clock.new_id())
    new = copy(world)
    new.query, new.first, new.ended = SinkQuery(world.query.sink, query_id), world.first + query.batch_id, 0
    return new
