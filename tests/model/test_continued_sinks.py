"""A query is saved and restored, and continues its sink, while its driver stands still, is killed, or goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pytest

from holdfast.errors import ConflictError, StateLostError
from holdfast.snapshotter.savepoints.manifest import require_sinks
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery, TwoPhaseSink
from tests.model.sink_target import Crash, CrashingStorage, Killed, ModelSink, Target
from tests.model.test_sink_drivers import QUERY, ModelWorld
from tests.model.turns import Turns
from tests.sink_drivers import Driver, World, judge, length, restored, saved
from tests.storage_in_ram import storage_in_ram
from tests.tiers import ALL


@dataclass
class OwnedTarget(Target):
    """Has a mark for each query that has owned it, in turn."""

    owner: str | None = None
    newest_of: dict[str, int] = field(default_factory=dict)


class OwnedSink(ModelSink):
    """Shows a query nothing of the one before it, and takes nothing more of that one, but what it has already."""

    target: OwnedTarget

    def open(self, query: SinkQuery, schema: pa.Schema) -> int:
        with self.crash.around():
            if query.was_shown is not None and self.target.owner is None:
                raise StateLostError("the query has never written here")
            if self.target.owner not in (None, query.query_id, query.replaces):
                raise ConflictError("another query writes here", owner=self.target.owner)
            self.target.owner = query.query_id
            return self.target.newest_of.get(query.query_id, -1)

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        if self.target.owner != query.query_id and any(handle["id"] in self.target.prepared for handle in handles):
            raise ConflictError("another query writes here", owner=self.target.owner)
        super().commit(query, batch_id, handles)
        newest = self.target.newest_of
        newest[query.query_id] = max(newest.get(query.query_id, -1), batch_id)


class OwnedWorld(ModelWorld):
    """The target belongs to one query at a time, as all real ones do."""

    target: OwnedTarget

    def sink(self, turns: Turns) -> TwoPhaseSink:
        return OwnedSink(self.target, turns)


@contextmanager
def world() -> Iterator[OwnedWorld]:
    with storage_in_ram() as storage:
        found = OwnedWorld(storage, QUERY)
        found.target = OwnedTarget(has_mark=True)
        yield found


def run(world: World, name: str = "old", steps: int | None = None) -> Driver:
    """Start a driver, and let it make so many requests, or all."""
    driver = Driver(world, name)
    driver.go(steps)
    return driver


with world() as _alone:
    STEPS = length(_alone)


@pytest.mark.parametrize("wakes", ["never", "before the start", "after the start"])
def test_a_query_is_saved_at_any_moment(wakes: str) -> None:
    """Its driver stands still before any request, is saved and restored, and may wake: it shows nothing more."""
    tried = 0
    for steps, begun in itertools.product(range(STEPS), range(1, STEPS, 2 if ALL else 6)):
        with world() as found:
            old = run(found, steps=steps)
            query = saved(found)
            if not query.sinks or query.batch_id < 0:
                continue
            new_world = restored(found, query)
            if wakes == "before the start":
                old.go()
            new = run(new_world, "new", begun)
            if wakes == "after the start":
                old.go()
            assert old.error is None or isinstance(old.error, ConflictError), repr(old.error)
            new.kill()
            judge(new_world)
            tried += 1
    assert tried > STEPS


def test_a_restore_that_is_killed_is_made_again() -> None:
    """Its first attempt may have ended the saved query: the second one, of another id, begins all the same."""
    for steps, at, after in itertools.product(range(12, STEPS, 1 if ALL else 3), range(1, 8), (False, True)):
        with world() as found:
            old = run(found, steps=steps)
            query = saved(found)
            if not query.sinks or query.batch_id < 0:
                continue
            killed = copy(found)
            killed.storage = CrashingStorage(found.storage, Crash(at=at, after=after))
            with suppress(Killed):
                restored(killed, query, "restored-1")
            new_world = restored(found, query, "restored-2")
            old.go()
            assert old.error is None or isinstance(old.error, ConflictError), repr(old.error)
            judge(new_world)


def test_a_query_that_went_on_is_not_continued_from_where_it_was() -> None:
    """What it has shown since is not in the savepoint: to show it again is what no restore does."""
    with world() as found:
        run(found)
        query = saved(found)
        run(found, "again")
        with pytest.raises(ConflictError, match=r"shows more than the savepoint holds.*saved=2.*shown=5"):
            require_sinks(found.storage, query)
        judge(found)


def test_a_restored_query_is_saved_in_its_turn() -> None:
    """At any moment of its first micro-batches, one of which its sink shows already, by another query's decision."""
    for steps in range(1, STEPS):
        with world() as found:
            old = Driver(found, "old")
            while found.ended < 0 or len(found.target.visible) < 4:
                old.go(1)
            first = restored(found, saved(found), "restored-1")
            run(first, "new", steps).kill()
            second = restored(first, saved(first), "restored-2")
            late = run(first, "late")
            assert "continued_by=restored-2" in str(late.error)
            judge(second)


def test_the_saved_query_is_refused_for_good() -> None:
    """It is told which query has taken its place, and does nothing to what that one needs."""
    with world() as found:
        run(found)
        new_world = restored(found, saved(found))
        refused = run(found, "refused")
        assert "another query continues this sink" in str(refused.error)
        assert "continued_by=restored" in str(refused.error)
        judge(new_world)


def refuse_elsewhere(there: World, name: str, steps: int) -> None:
    """Start a query, kill it after some steps, start it at another target, and at its own one again."""
    run(there, name, steps).kill()
    elsewhere = copy(there)
    elsewhere.target = OwnedTarget(has_mark=True)
    moved = run(elsewhere, "elsewhere")
    assert isinstance(moved.error, StateLostError), (steps, repr(moved.error))
    assert not elsewhere.target.visible
    judge(there)


def test_a_restored_query_cannot_have_another_target() -> None:
    """Not at its second start either, before it has decided anything: rows that the first target shows are dropped."""
    refused = 0
    for steps in range(STEPS):
        with world() as found:
            old = Driver(found, "old")
            while found.ended < 0 or len(found.target.visible) < 4:
                old.go(1)
            refuse_elsewhere(restored(found, saved(found)), "new", steps)
            refused += 1
    assert refused == STEPS


def test_a_query_that_replaces_another_one_cannot_have_another_target() -> None:
    """Not at its second start either, before it has decided anything: its results would go on where none are."""
    for steps in range(STEPS):
        with world() as found:
            run(found)
            heir = copy(found)
            heir.query = replace(found.query, query_id="heir", replaces=found.query.query_id)
            heir.first, heir.ended = found.ended + 1, -1
            refuse_elsewhere(heir, "heir", steps)


def test_who_replaces_a_restored_query_is_none_that_the_target_has_to_know() -> None:
    """Wherever the restored one was killed: of its own target nothing but that is asked."""
    for steps in range(STEPS):
        with world() as found:
            run(found)
            new_world = restored(found, saved(found))
            run(new_world, "new", steps).kill()
            third = copy(new_world)
            third.query = replace(new_world.query, query_id="third", replaces=new_world.query.query_id)
            begun = Driver(third, "third")
            begun.go()
            assert begun.error is None, (steps, repr(begun.error))
