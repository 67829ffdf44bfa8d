"""Drivers of a sink in all orders: each micro-batch is visible once, also where another query continues the sink."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.errors import ConflictError, StateLostError, UnavailableError
from holdfast.snapshotter.savepoints.manifest import require_sinks
from holdfast.snapshotter.sink_log import SinkLog
from holdfast.snapshotter.storage.object_storage import ObjectInfo
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery, TwoPhaseSink
from tests.model.sink_target import SCHEMA, Crash, CrashingStorage, Killed, ModelSink, Target
from tests.model.turns import Turns
from tests.ram import storage_in_ram
from tests.sink_drivers import Driver, World, judge, length, restored, saved
from tests.tiers import ALL, examples

QUERY = SinkQuery("model", "query-1")


class ModelWorld(World):
    """A target that is a plain dict."""

    target: Target

    def sink(self, turns: Turns) -> TwoPhaseSink:
        return ModelSink(self.target, turns)

    def prepare(self, sink: TwoPhaseSink, turns: Turns, batch_id: int, part: int, row: str) -> Handle:
        with turns.around():
            self.target.prepared[row] = batch_id
        return {"id": row}

    def shown(self) -> Sequence[str]:
        return list(self.target.visible)

    def left(self) -> Sequence[str]:
        return list(self.target.prepared)


@contextmanager
def world(*, has_mark: bool) -> Iterator[ModelWorld]:
    with storage_in_ram() as storage:
        found = ModelWorld(storage, QUERY)
        found.target = Target(has_mark)
        yield found


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("has_mark", [False, True])
def test_a_driver_that_stands_still_anywhere(has_mark: bool, is_killed: bool) -> None:
    """One stands still before any of its requests, another one starts and stands still, and the first one wakes.

    Or the other one is killed there, a third one finds what both have left, and the first one wakes when all is over.
    """
    with world(has_mark=has_mark) as alone:
        steps = length(alone)
    for first, second in itertools.product(
        range(0, steps, 1 if ALL else 2 + is_killed), range(1, steps, 1 if ALL else 5)
    ):
        with world(has_mark=has_mark) as found:
            one, other, third = (Driver(found, name) for name in ("one", "other", "third"))
            one.go(first)
            other.go(second)
            if is_killed:
                other.kill()
                third.go()
                one.go()
                judge(found, one, other, third)
            else:
                one.go()
                other.go()
                judge(found, one, other)


def test_a_request_that_fails_is_no_second_driver() -> None:
    """A run whose decision may stand ends with the storage's own error, and the next start commits it."""

    class Unanswered(CrashingStorage):
        def list(self, prefix: str) -> Sequence[ObjectInfo]:
            if self.fails:
                raise UnavailableError("no answer")
            return super().list(prefix)

        fails = False

    with storage_in_ram() as storage:
        target = Target(has_mark=True)
        flaky = Unanswered(storage, Crash())
        run = Coordinator(ModelSink(target, Crash()), QUERY, flaky, 100)
        run.start(0, SCHEMA)
        target.prepared["part"], flaky.fails = 0, True
        with pytest.raises(UnavailableError, match="no answer"):
            run.finish(0, Prepared(({"id": "part"},), 1))
        again = Coordinator(ModelSink(target, Crash()), QUERY, storage, 100)
        again.start(0, SCHEMA)
        assert again.is_decided(0)
        assert target.shown(0) == {"part"}


_numbers = itertools.count()


class CoordinatorModel(RuleBasedStateMachine):
    """One query that is killed and begun again; see the module."""

    @initialize(has_mark=st.booleans())
    def begin(self, has_mark: bool) -> None:
        self.target = Target(has_mark)
        self.crash = Crash()
        self.cleanup = ExitStack()
        self.storage = CrashingStorage(self.cleanup.enter_context(storage_in_ram()), self.crash)
        self.run: Coordinator | None = None
        self.batch_id = 0
        #: By micro-batch what each attempt prepared to be shown, and what the last one to end left visible.
        self.attempts: dict[int, list[set[str]]] = {}
        self.ended: dict[int, set[str]] = {}

    @rule(
        parts=st.integers(0, 3),
        at=st.none() | st.integers(1, 16),
        after=st.booleans(),
        kills=st.booleans(),
        repeated=st.booleans(),
        fails=st.booleans(),
    )
    def micro_batch(self, parts: int, at: int | None, after: bool, kills: bool, repeated: bool, fails: bool) -> None:
        """Spark runs a micro-batch; the driver may die, or a request fail, at any of its calls."""
        self.crash.at, self.crash.after, self.crash.kills, self.crash.calls = at, after, kills, 0
        try:
            self._run(parts, repeated=repeated, fails=fails)
        except (Killed, UnavailableError):
            self.run = None
        else:
            self.batch_id += 1

    def _run(self, parts: int, *, repeated: bool, fails: bool) -> None:
        batch_id = self.batch_id
        if self.run is None:
            run = Coordinator(
                ModelSink(self.target, self.crash), SinkQuery("model", "query-1"), self.storage, retained=3
            )
            run.start(batch_id, SCHEMA)
            assert not self.target.prepared, "a start leaves nothing half-done"
            self.run = run
        if self.run.is_decided(batch_id):
            self.ended[batch_id] = next(a for a in self.attempts[batch_id] if a and a == self.target.shown(batch_id))
            return
        assert not self.ended.get(batch_id), "what was shown is not written again"
        try:
            prepared = self._prepare(batch_id, parts, repeated=repeated)
            if fails:
                raise UnavailableError("a task failed")
            self.run.finish(batch_id, prepared)
        except UnavailableError:
            self.run.give_up()
            raise
        self.ended[batch_id] = self.attempts[batch_id][-1]
        if repeated and parts and self.crash.at is None:
            assert not self.target.prepared, "attempts that do not count are given up at once"

    def _prepare(self, batch_id: int, parts: int, *, repeated: bool) -> Prepared:
        """Write one attempt; where tasks were repeated, one that does not count is prepared as well."""
        handles = [f"attempt-{next(_numbers)}" for _ in range(parts)]
        self.attempts.setdefault(batch_id, []).append(set(handles))
        twins = [f"twin-{next(_numbers)}"] if repeated and parts else []
        self.target.prepared |= dict.fromkeys([*handles, *twins], batch_id)
        return Prepared(tuple({"id": handle} for handle in handles), parts, repeated)

    @rule()
    def restart(self) -> None:
        """The driver ends between two micro-batches."""
        self.run = None

    @rule()
    @precondition(
        lambda self: self.run is None and self.batch_id - 1 in self.ended and self.batch_id not in self.attempts
    )
    def repeat(self) -> None:
        """Spark had not noted the end of the last micro-batch when the driver died: it repeats that one."""
        if not self.target.forgotten & self.ended[self.batch_id - 1]:
            self.batch_id -= 1

    @rule()
    @precondition(lambda self: self.run is None)
    def days_go_by(self) -> None:
        """The query is stopped for so long that the target forgets what Spark has ended."""
        self.target.forgotten |= {h for batch, handles in self.ended.items() if batch < self.batch_id for h in handles}

    @rule()
    def a_zombie_prepares(self) -> None:
        """A worker of an attempt that is over prepares late."""
        self.target.prepared[f"zombie-{next(_numbers)}"] = self.batch_id

    @invariant()
    def what_is_shown_is_of_one_attempt(self) -> None:
        for batch_id, attempts in getattr(self, "attempts", {}).items():
            shown = self.target.shown(batch_id)
            assert any(shown <= attempt for attempt in attempts), "no attempts are mixed"
            if batch_id < self.batch_id:
                assert shown == self.ended[batch_id], "what Spark has ended is visible, whole and once"

    def teardown(self) -> None:
        if hasattr(self, "cleanup"):
            self.cleanup.close()


TestCoordinator = CoordinatorModel.TestCase
TestCoordinator.settings = settings(max_examples=examples(100, 200, 2_000), stateful_step_count=30, deadline=None)


@dataclass
class OwnedTarget(Target):
    """Has a mark for each query that has owned it, in turn."""

    owner: str | None = None
    newest_of: dict[str, int] = field(default_factory=dict)
    #: By part the query that prepared it
    query_of: dict[str, str] = field(default_factory=dict)


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

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        found = super().leftovers(query)
        return [handle for handle in found if self.target.query_of[str(handle["id"])] == query.query_id]


class OwnedWorld(ModelWorld):
    """The target belongs to one query at a time, as all real ones do."""

    target: OwnedTarget

    def sink(self, turns: Turns) -> TwoPhaseSink:
        return OwnedSink(self.target, turns)

    def prepare(self, sink: TwoPhaseSink, turns: Turns, batch_id: int, part: int, row: str) -> Handle:
        self.target.query_of[row] = self.query.query_id
        return super().prepare(sink, turns, batch_id, part, row)


@contextmanager
def continued_world() -> Iterator[OwnedWorld]:
    with storage_in_ram() as storage:
        found = OwnedWorld(storage, QUERY)
        found.target = OwnedTarget(has_mark=True)
        yield found


def run(continued_world: World, name: str = "old", steps: int | None = None) -> Driver:
    """Start a driver, and let it make so many requests, or all."""
    driver = Driver(continued_world, name)
    driver.go(steps)
    return driver


with continued_world() as _alone:
    STEPS = length(_alone)


def standing(*moments: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield a world, its driver that stands still after so many steps, the first of each moment, and the saved query.

    The rest of the moment follows. Left out are moments at which a savepoint holds no micro-batch of a sink.
    """
    for steps, *rest in itertools.product(*moments):
        with continued_world() as found:
            old = run(found, steps=steps)
            query = saved(found)
            if query.sinks and query.batch_id >= 0:
                yield found, old, query, *rest


@pytest.mark.parametrize("wakes", ["never", "before the start", "after the start"])
def test_a_query_is_saved_at_any_moment(wakes: str) -> None:
    """Its driver stands still before any request, is saved and restored, and may wake: it shows nothing more."""
    tried = 0
    for found, old, query, begun in standing(range(STEPS), range(1, STEPS, 2 if ALL else 6)):
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


def test_what_a_saved_query_prepares_when_it_wakes_is_ended_by_a_later_start() -> None:
    """The restored one has begun for good by then, and the old driver dies before it is told."""
    left = 0
    for found, old, query, woken in standing(range(0, STEPS, 1 if ALL else 3), (1, 2)):
        new_world = restored(found, query)
        run(new_world, "new")
        old.go(woken)
        old.kill()
        left += len(new_world.left())
        judge(new_world)
    assert left


def test_a_restore_that_is_killed_is_made_again() -> None:
    """Its first attempt may have ended the saved query: the second one, of another id, begins all the same."""
    every_step = range(12, STEPS, 1 if ALL else 3)
    for found, old, query, at, after in standing(every_step, range(1, 8), (False, True)):
        killed = copy(found)
        killed.storage = CrashingStorage(found.storage, Crash(at=at, after=after))
        with suppress(Killed):
            restored(killed, query, "restored-1")
        new_world = restored(found, query, "restored-2")
        old.go()
        assert old.error is None or isinstance(old.error, ConflictError), repr(old.error)
        judge(new_world)


def test_a_savepoint_is_restored_again_until_something_is_shown() -> None:
    """The first restored query may have begun, and was killed at any step; its location is lost."""
    again = 0
    for found, _, query, steps in standing(range(12, STEPS, 1 if ALL else 3), range(STEPS)):
        first = restored(found, query, "restored-1")
        run(first, "first", steps).kill()
        entry, _ = SinkLog(found.storage, QUERY.sink).latest()
        assert entry is not None
        if entry.continues:
            judge(restored(found, query, "restored-2"))
            again += 1
        else:
            with pytest.raises(ConflictError, match="another query has continued this sink"):
                restored(found, query, "restored-2")
            judge(first)
    assert again


def test_an_earlier_savepoint_is_not_restored_over_a_later_one() -> None:
    """The sink shows what was decided between the two, which the query that was restored from the later one drops."""
    for steps in range(STEPS):
        with continued_world() as found:
            old = Driver(found, "old")
            while found.ended < 0:
                old.go(1)
            early = replace(saved(found), planned=None)
            while len(found.target.visible) < 4:
                old.go(1)
            assert saved(found).uncommitted[0].batch_id == early.batch_id + 1
            later = restored(found, saved(found), "restored-1")
            run(later, "new", steps).kill()
            with pytest.raises(ConflictError, match=r"shows more than the savepoint holds|continued this sink since"):
                restored(found, early, "restored-2")
            judge(later)


def test_a_query_that_went_on_is_not_continued_from_where_it_was() -> None:
    """What it has shown since is not in the savepoint: to show it again is what no restore does."""
    with continued_world() as found:
        run(found)
        query = saved(found)
        run(found, "again")
        with pytest.raises(ConflictError, match=r"shows more than the savepoint holds.*saved=2.*shown=5"):
            require_sinks(found.storage, query)
        judge(found)


def test_a_restored_query_is_saved_in_its_turn() -> None:
    """At any moment of its first micro-batches, one of which its sink shows already, by another query's decision."""
    for steps in range(1, STEPS):
        with continued_world() as found:
            old = Driver(found, "old")
            while found.ended < 0 or len(found.target.visible) < 4:
                old.go(1)
            first = restored(found, saved(found), "restored-1")
            run(first, "new", steps).kill()
            second = restored(first, saved(first), "restored-2")
            late = run(first, "late")
            assert "continued_by=restored-2" in str(late.error)
            judge(second)


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
        with continued_world() as found:
            old = Driver(found, "old")
            while found.ended < 0 or len(found.target.visible) < 4:
                old.go(1)
            refuse_elsewhere(restored(found, saved(found)), "new", steps)
            refused += 1
    assert refused == STEPS


def test_a_query_that_replaces_another_one_cannot_have_another_target() -> None:
    """Not at its second start either, before it has decided anything: its results would go on where none are."""
    for steps in range(STEPS):
        with continued_world() as found:
            run(found)
            heir = copy(found)
            heir.query = replace(found.query, query_id="heir", replaces=found.query.query_id)
            heir.first, heir.ended = found.ended + 1, -1
            refuse_elsewhere(heir, "heir", steps)


def test_who_replaces_a_restored_query_is_none_that_the_target_has_to_know() -> None:
    """Wherever the restored one was killed: of its own target nothing but that is asked."""
    for steps in range(STEPS):
        with continued_world() as found:
            run(found)
            new_world = restored(found, saved(found))
            run(new_world, "new", steps).kill()
            third = copy(new_world)
            third.query = replace(new_world.query, query_id="third", replaces=new_world.query.query_id)
            begun = Driver(third, "third")
            begun.go()
            assert begun.error is None, (steps, repr(begun.error))
