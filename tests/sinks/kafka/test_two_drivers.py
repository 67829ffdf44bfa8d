"""Two drivers write to one topic, of which any may stand still between any two of its requests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.kafka.brokers import Cluster
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, TwoPhaseSink
from tests import sink_drivers
from tests.model.turns import Turns
from tests.servers.kafka import Kafka
from tests.sink_drivers import Driver, World, judge, stand_still_anywhere
from tests.sinks.kafka.lab import SCHEMA, Lab
from tests.tiers import ALL, LONG

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(1800)]


class KafkaWorld(World):
    """A topic; each request of a driver is a step, those of its tasks, too."""

    def __init__(self, lab: Lab, state_dir: Path) -> None:
        super().__init__(open_storage(str(state_dir)), lab.query)
        self.lab = lab

    def sink(self, turns: Turns) -> TwoPhaseSink:
        return self.lab.sink

    def prepare(self, sink: TwoPhaseSink, turns: Turns, batch_id: int, part: int, row: str) -> Handle:
        attempt = SinkAttempt(self.query, batch_id, part, clock.new_id() + clock.new_id())
        transaction = sink.begin(attempt, SCHEMA)
        transaction.write(pa.record_batch([[row]], schema=SCHEMA))
        return transaction.prepare()

    def shown(self) -> Sequence[str]:
        return self.lab.shown()

    def left(self) -> Sequence[object]:
        return self.lab.sink.leftovers(self.query)


@pytest.fixture
def make(kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], KafkaWorld]:
    """Return what makes a new world; a driver's turns know what it is about to ask."""
    ask = Cluster._ask

    def ask_in_turn(cluster: Cluster, address: Any, request: Any) -> Any:
        driver = threading.current_thread()
        if not isinstance(driver, Driver):
            return ask(cluster, address, request)
        driver.turns.asks = request.name
        with driver.turns.around():
            driver.turns.asks = None
            return ask(cluster, address, request)

    monkeypatch.setattr(Cluster, "_ask", ask_in_turn)
    monkeypatch.setattr(sink_drivers, "SCHEMA", SCHEMA)
    number = itertools.count()
    return lambda: KafkaWorld(Lab(kafka, {"bootstrap.servers": kafka.servers}), tmp_path / str(next(number)))


@pytest.mark.slow(5)
@pytest.mark.parametrize("marks", range(3))
def test_a_driver_that_writes_its_mark_late(make: Callable[[], KafkaWorld], marks: int) -> None:
    """It turns the mark back behind what its successor has shown, which is not taken for a topic that was emptied."""
    with make() as world:
        one = Driver(world, "one")
        for _ in range(marks):
            _go_to_its_mark(one)
            one.go(1)
        _go_to_its_mark(one)
        other = Driver(world, "other")
        other.go()
        one.go()
        judge(world, one, other)


@pytest.mark.slow(25)
def test_a_driver_that_stands_still_anywhere(make: Callable[[], KafkaWorld]) -> None:
    """One stands still before any of its requests, another one starts and stands still, and the first one wakes."""
    stand_still_anywhere(
        make, first_every=1 if LONG else 4 if ALL else 31, second_every=7 if LONG else 11 if ALL else 37
    )


def _go_to_its_mark(driver: Driver) -> None:
    while driver.turns.asks != "OffsetCommit":
        driver.go(1)
        assert driver.error is None
