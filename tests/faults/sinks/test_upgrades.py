"""Queries that are upgraded again and again under kills: readers of their sinks' targets find exactly the truth.

benches/SINKS.md shows 50 upgrades in a row, by HOLDFAST_TEST_UPGRADES=50."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from deltalake.exceptions import TableNotFoundError

from holdfast.errors import NotFoundError
from tests.faults.killings import Killings
from tests.faults.sinks import upgraded_queries
from tests.faults.sinks.judging import Census, census
from tests.faults.sinks.killed_at import STEPS
from tests.faults.sinks.killed_query import ROWS
from tests.faults.sinks.targets import SCHEMA, TARGETS, Place
from tests.faults.sinks.upgraded_queries import SOURCES, Job
from tests.input_files import add_file
from tests.tiers import LONG

pytestmark = [pytest.mark.all, pytest.mark.slow(200), pytest.mark.spark, pytest.mark.timeout(7200)]

_HOWS = ("decided", "stop", "kill", "stop", "shown", "stop")
_DIES_AT = {"decided": "decided", "shown": "committed"}
_PATIENCE_S = 900.0


@dataclass
class Upgrades(Killings):
    """One run of the queries."""

    job: Job
    chance: random.Random
    program: str = upgraded_queries.__name__
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_HOWS, 0))
    batches: int = 0

    def run(self, upgrades: int) -> dict[str, Census]:
        """Upgrade so often; return what readers find in each target in the end, or after an upgrade that is wrong."""
        with self.cleaned_up():
            self.start_driver()
            self._await(lambda: self._is_there("running"), "they do not start")
            self._feed(1)  # nothing can be saved before
            self._judged()
            for number in range(upgrades):
                self._upgrade(_HOWS[number % len(_HOWS)], number)
                found = self._judged()
                print(f"{number + 1} upgrades, {self.batches} micro-batches: {self.done}", flush=True)
                if not (self.job.is_plain or all(each.is_right for each in found.values())):
                    break
        self.stop_servers()
        return found

    def _upgrade(self, how: str, number: int) -> None:
        places, marks = list(self.job.places or {}), self.job.path / "marks"
        if how in _DIES_AT and self.job.is_plain:
            self._mark("parquet", "committed")
        elif how in _DIES_AT:
            self._mark(places[number % len(places)], _DIES_AT[how])
        self._feed(self.chance.choice((2, 3)))
        if how not in _DIES_AT:
            time.sleep(self.chance.uniform(0, 4))
        if how == "stop":
            (self.job.path / "stop").mkdir(exist_ok=True)
            (self.job.path / "stop" / str(self.job.generation)).touch()
        elif how == "kill":
            assert self._driver is not None
            os.killpg(self._driver.pid, signal.SIGKILL)
        self.done[how] += 1
        if how != "stop":
            self._await(lambda: not self.is_running(), "the driver does not die", dies=True)
            shutil.rmtree(marks, ignore_errors=True)
        self.tell(f"generation {self.job.generation} has ended: {how}")
        self.job = replace(self.job, generation=self.job.generation + 1)
        if how != "stop":
            self.start_driver()
        self._await(lambda: self._is_there("running"), "they are not restored")

    def _mark(self, target: str, step: str) -> None:
        """Have the driver die once at a step of this target's sink."""
        folder = self.job.path / "marked"
        folder.mkdir(parents=True)
        for each in STEPS:
            if each != step:
                (folder / each).touch()
        (self.job.path / "marks").mkdir()
        folder.rename(self.job.path / "marks" / target)
        self.tell(f"{target} is to die: {step}")

    def _feed(self, batches: int) -> None:
        """Add the numbers of some micro-batches, both as files and as messages."""
        where = self.job.numbers or {}
        producer = Producer({"bootstrap.servers": where["servers"]})
        for batch in range(self.batches, self.batches + batches):
            numbers = range(ROWS * batch, ROWS * (batch + 1))
            add_file(Path(where["folder"]), batch, pa.table({"value": pa.array(numbers, pa.int64())}))
            for number in numbers:
                producer.produce(where["topic"], str(number).encode(), partition=0)  # a micro-batch of each
            producer.flush()
        self.batches += batches

    def _judged(self) -> dict[str, Census]:
        """Return what readers find in each target once it shows all numbers that were fed, or has had its time."""
        found: dict[str, Census] = {}

        def is_whole() -> bool:
            for name, place in (self.job.places or {}).items():
                if name not in found or found[name].lost:
                    found[name] = census(self._read(name, place), self.batches, upserts=TARGETS[name].upserts)
            return not any(each.lost for each in found.values())

        self._await(is_whole, "results are missing")
        return found

    def _read(self, name: str, place: Place) -> pa.Table:
        try:
            return TARGETS[name].read(place)
        except (NotFoundError, TableNotFoundError):
            if self.job.generation:
                raise
            return SCHEMA.empty_table()

    def _is_there(self, folder: str) -> bool:
        return (self.job.path / folder / str(self.job.generation)).exists()

    def _await(self, condition: Callable[[], bool], otherwise: str, *, dies: bool = False) -> None:
        end_s = time.monotonic() + _PATIENCE_S
        while not condition():
            assert dies or self.is_running(), f"the driver has ended with {self.ended_with}; {self.describe()}"
            assert time.monotonic() < end_s, f"{otherwise}; {self.describe()}"
            time.sleep(0.2)


UPGRADES = int(os.environ.get("HOLDFAST_TEST_UPGRADES") or (12 if LONG else 6))


@pytest.fixture
def job(java_home: Path, tmp_path: Path) -> Iterator[Job]:
    """Return what drivers are to do, while all targets serve."""
    with ExitStack() as servers:
        places = {}
        for name in SOURCES:
            (tmp_path / name).mkdir()
            places[name] = servers.enter_context(TARGETS[name].served(tmp_path / name))
        (tmp_path / "input").mkdir()
        topic = TARGETS["kafka"].anew(places["kafka"], tmp_path)
        numbers = {"folder": str(tmp_path / "input"), **topic}
        yield Job(str(tmp_path), compiles=False, places=places, numbers=numbers)


def test_an_upgrade_shows_each_result_once(job: Job) -> None:
    """After a stop, a SIGKILL at any moment, after a decision, and before Spark's commit."""
    run, began_s = Upgrades(job, random.Random("upgrades")), time.monotonic()
    found = run.run(UPGRADES)
    print(f"\n{run.done} in {time.monotonic() - began_s:.0f} s; {found}")
    assert all(each.is_right for each in found.values()), f"{found}; {run.describe()}"


def test_what_others_do(job: Job) -> None:
    """The same upgrades with Spark's own Kafka sink, and with plain appends: results are doubled."""
    run, began_s = Upgrades(Job(**{**job.__dict__, "is_plain": True}), random.Random("upgrades")), time.monotonic()
    found = run.run(UPGRADES)
    print(f"\nthe plain way: {run.done} in {time.monotonic() - began_s:.0f} s; {found}")
    assert any(each.doubled for each in found.values())
