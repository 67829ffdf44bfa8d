"""Two drivers of one query and one sink that run at once, freeze, wake and die; and what a reader finds afterwards.

::

    running    one ──────────────────┬──────────▶ ends, or is killed
                      other ─────────┴───▶ or this one is killed, and a third one starts
    frozen     one ───── SIGSTOP ──────────────────── SIGCONT ──▶
                                   other ──── may freeze, too, or be killed ────▶

    last       starts when all have ended, and must go on

Moments are drawn from the case's seed, but what a driver is doing at that moment is the machine's business.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from holdfast import clock
from tests.faults.sinks import lean_driver
from tests.faults.sinks.judging import census
from tests.faults.sinks.lean_driver import Job, keys_of
from tests.faults.sinks.targets import Place, Target

_PATIENCE_S = 300.0
_LAST_BATCHES = 2
_LOST = ("FencedError", "ConflictError")
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload([lean_driver.__name__, "deltalake", "psycopg", "confluent_kafka"])


@dataclass
class Tally:
    """What came of overlaps; of the faults, how often each was seen."""

    overlaps: int = 0
    batches: int = 0
    killed: int = 0
    frozen: int = 0
    losers: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def row(self, name: str) -> str:
        losers = ", ".join(f"{number} {error}" for error, number in sorted(self.losers.items())) or "none"
        faults = [self.faults[kind] for kind in ("bricked", "corrupted", "lost", "doubled", "mixed", "wrong")]
        numbers = [self.overlaps, self.batches, self.killed, self.frozen, losers, *faults]
        return f"| {name} | {' | '.join(map(str, numbers))} |"


class Driver:
    """One running driver, as the machine's other processes see it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._outer = _forkserver.Process(target=lean_driver.run, args=(job,))
        self._outer.start()
        assert self._outer.pid is not None
        self._seen = psutil.Process(self._outer.pid)

    @property
    def error(self) -> str | None:
        """What ended it: the name of an error; None for nothing, or a kill."""
        return self._end().get("error")

    def story(self) -> str:
        end = self._end()
        return f"{self.job.name}: {end.get('trace') or end or 'killed'}"

    @property
    def left(self) -> int:
        return int(self._end().get("left", 0))

    @property
    def ended_well(self) -> bool:
        return self._outer.exitcode == 0

    def is_alive(self) -> bool:
        return self._outer.is_alive()

    def send(self, number: signal.Signals, *, to_workers: bool = True) -> bool:
        """Send a signal; tell whether there still was a driver."""
        with suppress(psutil.Error):
            driver, *workers = self._seen.children(recursive=True) or [None]
            for process in [driver, *(workers if to_workers else [])]:
                if process is not None:
                    process.send_signal(number)
            return driver is not None
        return False

    def join(self, patience_s: float = _PATIENCE_S) -> bool:
        self._outer.join(patience_s)
        return not self._outer.is_alive()

    def _end(self) -> dict[str, str]:
        path = self.job.path / "ends" / self.job.name
        return dict(json.loads(path.read_text())) if path.exists() else {}


class Overlap:
    """One case; `run` adds to a tally, and returns what went wrong."""

    def __init__(self, target: Target, job: Job, *, freezes: bool) -> None:
        self._target, self._job, self._freezes = target, job, freezes
        self._chance = random.Random(job.seed)
        self._drivers: list[Driver] = []
        self._story: list[str] = []
        self._began_s = time.monotonic()

    def run(self, tally: Tally) -> str:
        """Return the story of a case with a fault; nothing for a good one."""
        for folder in ("ended", "ends"):
            (self._job.path / folder).mkdir(parents=True)
        tally.overlaps += 1
        try:
            self._overlap(tally)
            (self._job.path / "stop").touch()
            faults = Counter(bricked=sum(not driver.join() for driver in self._drivers))
        finally:
            for driver in self._drivers:
                driver.send(signal.SIGKILL)
        for driver in self._drivers:
            if driver.error in _LOST:
                tally.losers[driver.error] += 1
            elif driver.error is not None:
                faults[driver.error] += 1
        faults += self._judge()
        tally.batches += self._job.first_batch()
        tally.faults += faults
        return "" if not faults else "\n".join([str(dict(faults)), *self._story, *(d.story() for d in self._drivers)])

    def _overlap(self, tally: Tally) -> None:
        chance = self._chance
        one = self._start("one")
        self._reach(chance.choice((0, 0, 1, 2)))
        time.sleep(chance.uniform(0, 0.4))
        if self._freezes:
            self._freeze(one, tally)
        other = self._start("other")
        time.sleep(chance.uniform(0, 1))
        running = [other] if self._freezes else [one, other]
        if chance.random() < 0.6:
            tally.killed += self._send(chance.choice(running), signal.SIGKILL)
            if chance.random() < 0.7:
                running.append(self._start("third"))
                time.sleep(chance.uniform(0, 0.6))
        if self._freezes:
            if chance.random() < 0.4:
                self._freeze(running[-1], tally)
            self._send(one, signal.SIGCONT)
            time.sleep(chance.uniform(0, 0.5))
            if chance.random() < 0.2:
                tally.killed += self._send(one, signal.SIGKILL)
            self._send(running[-1], signal.SIGCONT)

    def _judge(self) -> Counter[str]:
        """Let the last driver go on, and read the target as other people do."""
        faults: Counter[str] = Counter()
        (self._job.path / "stop").unlink()
        last = self._start("last", batches=_LAST_BATCHES)
        if not (last.join() and last.ended_well):
            last.send(signal.SIGKILL)
            faults["bricked"] += 1
        faults["left over"] += last.left
        try:
            rows = self._target.read(self._job.place)
        except Exception as exc:  # noqa: BLE001  whatever the reader says of it
            self._story.append(f"the reader: {exc!r}")
            return faults + Counter(corrupted=1)
        found = census(rows, self._job.first_batch(), upserts=self._target.upserts, keys_of=keys_of)
        self._story.append(str(found))
        return +(faults + Counter(lost=found.lost, doubled=found.doubled, wrong=found.wrong, mixed=found.mixed))

    def _start(self, name: str, batches: int | None = None) -> Driver:
        self._tell(f"{name} starts")
        job = Job(**{**self._job.__dict__, "name": name, "batches": batches})
        self._drivers.append(Driver(job))
        return self._drivers[-1]

    def _freeze(self, driver: Driver, tally: Tally) -> None:
        """Freeze the driver, or its whole machine."""
        tally.frozen += self._send(driver, signal.SIGSTOP, to_workers=self._chance.random() < 0.5)

    def _send(self, driver: Driver, number: signal.Signals, *, to_workers: bool = True) -> bool:
        self._tell(f"{number.name} to {driver.job.name}{', its workers too' * to_workers}")
        return driver.send(number, to_workers=to_workers)

    def _reach(self, batches: int) -> None:
        end_s = time.monotonic() + _PATIENCE_S
        while self._job.first_batch() < batches and self._drivers[0].is_alive():
            assert time.monotonic() < end_s, "no micro-batch ends"
            time.sleep(0.005)

    def _tell(self, event: str) -> None:
        at_s = time.monotonic() - self._began_s
        self._story.append(f"{at_s:.2f} s, {self._job.first_batch()} micro-batches: {event}")


def overlap(
    target: Target, name: str, place: Place, folder: Path, numbers: range, *, freezes: bool, tell: Callable[[str], None]
) -> Tally:
    """Run the cases of these numbers one after the other, each with an empty target; tell of those with a fault."""
    tally = Tally()
    for number in numbers:
        where = folder / str(number)
        where.mkdir()
        seed = f"{name} {'frozen' if freezes else 'running'} {number}"
        job = Job(str(where), name, target.anew(place, where), clock.new_uuid(), "", seed)
        if story := Overlap(target, job, freezes=freezes).run(tally):
            tell(f"case {number}: {story}")
    return tally
