"""Two and three drivers of one query and one sink, of which any may stand still between any two of its requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectInfo
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery, TwoPhaseSink
from tests.model.sink_target import SCHEMA, Crash, CrashingStorage, ModelSink, Target
from tests.model.turns import Turns
from tests.sink_drivers import Driver, World, judge, length
from tests.storage_in_ram import storage_in_ram
from tests.tiers import ALL

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


@pytest.mark.parametrize("has_mark", [False, True])
def test_a_driver_that_stands_still_anywhere(has_mark: bool) -> None:
    """One stands still before any of its requests, another one starts and stands still, and the first one wakes."""
    with world(has_mark=has_mark) as alone:
        steps = length(alone)
    for first, second in itertools.product(range(0, steps, 1 if ALL else 2), range(1, steps, 1 if ALL else 5)):
        with world(has_mark=has_mark) as found:
            one = Driver(found, "one")
            one.go(first)
            other = Driver(found, "other")
            other.go(second)
            one.go()
            other.go()
            judge(found, one, other)


@pytest.mark.parametrize("has_mark", [False, True])
def test_a_driver_that_is_killed_while_another_one_stands_still(has_mark: bool) -> None:
    """So the third one finds what both have left, one of which wakes when all is over."""
    with world(has_mark=has_mark) as alone:
        steps = length(alone)
    for first, second in itertools.product(range(0, steps, 1 if ALL else 3), range(1, steps, 1 if ALL else 5)):
        with world(has_mark=has_mark) as found:
            one, other = Driver(found, "one"), None
            one.go(first)
            other = Driver(found, "other")
            other.go(second)
            other.kill()
            third = Driver(found, "third")
            third.go()
            one.go()
            judge(found, one, other, third)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=40), st.booleans(), st.booleans())
def test_three_drivers_in_any_order(schedule: Sequence[tuple[int, int]], has_mark: bool, kills: bool) -> None:
    """Each begins at its first turn, so that starts, decisions and commits meet everywhere."""
    with world(has_mark=has_mark) as found:
        drivers: dict[int, Driver] = {}
        for number, steps in schedule:
            if number not in drivers:
                drivers[number] = Driver(found, f"driver-{number}")
            drivers[number].go(steps)
        if kills and drivers:
            drivers[min(drivers)].kill()
        for driver in drivers.values():
            driver.go()
        if drivers:
            judge(found, *drivers.values())


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
