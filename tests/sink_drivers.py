"""Drivers of one query and one sink, of which any may stand still between any two of its requests.

Spark is a number that drivers share, as they share a checkpoint location: the newest micro-batch that was ended.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast import clock
from holdfast.errors import ConflictError, HoldfastError
from holdfast.snapshotter.ownership.queries import QueryOrigin, declare_origin
from holdfast.snapshotter.savepoints.manifest import PlannedBatch, SavedQuery, continue_sinks, sinks_of
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery, TwoPhaseSink
from holdfast.spark_integration.sinks.writing import write_rows
from tests.model.sink_target import CrashingStorage, Killed
from tests.model.turns import Actor, Position, Turns

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

SCHEMA = pa.schema({"row": pa.string()})


def prepared(sink: TwoPhaseSink, query: SinkQuery, rows: pa.RecordBatch, batch_id: int = 0, part: int = 0) -> Handle:
    """Write and prepare a part of a micro-batch, as a task does."""
    attempt = SinkAttempt(query, batch_id, part, clock.new_id() + clock.new_id())
    return dict(json.loads(write_rows(sink, attempt, rows.schema, [rows])[1]))


class World(ABC):
    """What all drivers of a query share: the state directory, the target, and Spark's log of ended micro-batches."""

    #: The number in rows of the query's micro-batch 0: a restored query goes on after the saved one, with numbers anew.
    first = 0
    #: How many micro-batches a driver runs, and of how many parts each is.
    batches, parts = 3, 2

    def __init__(self, storage: ObjectStorage, query: SinkQuery) -> None:
        self.storage, self.query = storage, query
        self.ended = -1

    def next_batch(self) -> int:
        return self.ended + 1

    def end(self, batch_id: int) -> None:
        self.ended = max(self.ended, batch_id)

    def call(self, method: Any, *given: Any) -> None:
        """Call a method of a coordinator."""
        method(*given)

    @abstractmethod
    def sink(self, turns: Turns) -> TwoPhaseSink:
        """Return the sink as a driver uses it."""

    def prepare(self, sink: TwoPhaseSink, turns: Turns, batch_id: int, part: int, row: str) -> Handle:
        """Write and prepare a part of one row."""
        return prepared(sink, self.query, pa.record_batch([[row]], schema=SCHEMA), batch_id, part)

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


def run_batches(world: World, name: str, turns: Turns) -> None:
    """Start where Spark's log says, and run a few micro-batches."""
    with turns.around():
        first = world.next_batch()
    sink = world.sink(turns)
    coordinator = Coordinator(sink, world.query, CrashingStorage(world.storage, turns), retained=3)
    world.call(coordinator.start, first, SCHEMA)
    for batch_id in range(first, first + world.batches):
        if not coordinator.is_decided(batch_id):
            rows = [f"{world.first + batch_id}-{name}-{part}" for part in range(world.parts)]
            try:
                handles = [world.prepare(sink, turns, batch_id, part, row) for part, row in enumerate(rows)]
            except HoldfastError:
                coordinator.give_up()
                raise
            world.call(coordinator.finish, batch_id, Prepared(tuple(handles), world.parts))
        with turns.around():
            world.end(batch_id)


class Driver(Actor):
    """One driver, which has a name of its own: so a row says which attempt at its micro-batch it is of."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(lambda turns: run_batches(world, name, turns), name)


def judge(world: World, *drivers: Driver | Position) -> None:
    """Whoever lost says so; a later start goes on; and readers see each micro-batch once, of one attempt."""
    judge_ends(*drivers)
    last = Driver(world, "last")
    last.go()
    if last.error is not None:
        raise AssertionError("the next start does not go on") from last.error
    assert not world.left(), f"left half-done: {world.left()}"
    assert shown_batches(world) == list(range(world.first + world.next_batch())), "each micro-batch is shown"


def judge_ends(*drivers: Driver | Position) -> None:
    """Whoever lost says so, and not all did."""
    for driver in drivers:
        if driver.error is not None and not isinstance(driver.error, (ConflictError, Killed)):
            raise AssertionError(f"{driver.name} ended otherwise than as the loser") from driver.error
    has_won = any(driver.error is None or isinstance(driver.error, Killed) for driver in drivers)
    assert has_won or not drivers, "nobody has won"


def shown_batches(world: World) -> list[int]:
    """Return the micro-batches that readers see; each must be there once, whole and of one attempt."""
    rows: dict[int, list[str]] = {}
    for row in world.shown():
        rows.setdefault(int(row.partition("-")[0]), []).append(row)
    for shown in rows.values():
        assert len({row.rpartition("-")[0] for row in shown}) == 1, f"not of one attempt: {shown}"
        assert sorted(row.rpartition("-")[2] for row in shown) == [*map(str, range(world.parts))], f"twice: {shown}"
    return sorted(rows)


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
