"""Kills the processes of `killed_query` and the server of its sink, at random moments or at each step by name."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.killings import Killings
from tests.faults.sinks import killed_query
from tests.faults.sinks.judging import Census, census
from tests.faults.sinks.killed_at import STEPS
from tests.faults.sinks.killed_query import Job, newest_commit
from tests.faults.sinks.targets import Target, target_of

#: How long a query may go without a micro-batch.
_PATIENCE_S = 180.0
_MOMENTS = {
    "the decision": "durable/_sinks/*/*",
    "Spark's offsets": "query/offsets/[0-9]*",
    "Spark's state": "query/state/0/*/*",
    "Spark's commit": "query/commits/[0-9]*",
    "the write's end": "written/*",
}


@dataclass
class SinkKillings(Killings):
    """One run of the query, which goes on until so many processes were killed."""

    job: Job
    chance: random.Random
    program: str = killed_query.__name__
    done: dict[str, int] = field(default_factory=dict)
    driver_starts: int = 0

    @property
    def target(self) -> Target:
        return target_of(self.job.target)

    def run(self, kills: int, victims: Sequence[str] = ("driver", "worker", "server", "sink's server")) -> None:
        """Kill until so many processes were killed in all, then let the query end between two micro-batches."""
        self.victims = tuple(each for each in victims if each != "sink's server" or self.target.has_server)
        self.job.stop.unlink(missing_ok=True)
        with self.cleaned_up():
            self._start()
            self._progress(1)
            while sum(self.done.values()) < kills:
                self._kill_one(kills)
                self._keep_running()
            self.end()

    def run_steps(self) -> None:
        """Let the query die at each step of the protocol."""
        marks = self.job.path / "marks"
        with self.cleaned_up():
            self._start()
            self._progress(2)
            marks.mkdir()
            died, since = 0, time.monotonic()
            while died < len(STEPS):
                self._keep_running()
                if self.count("marks/*") > died:
                    died, since = self.count("marks/*"), time.monotonic()
                    self.tell(f"died at {max(marks.iterdir(), key=os.path.getmtime).name}")
                assert time.monotonic() < since + _PATIENCE_S, f"dies no more; {self.describe()}"
                time.sleep(0.02)
            self.done = dict.fromkeys(STEPS, 1)
            self._progress(2)
            self.end()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the driver and all that is of its process group."""
        assert self._driver is not None
        os.killpg(self._driver.pid, number)

    def judged(self) -> Census:
        """Return what a reader finds when the query has ended."""
        batches = newest_commit(self.job) + 1
        return census(self.target.read(self.job.place or {}), batches, upserts=self.target.upserts)

    def _start(self) -> None:
        self.start_driver()
        self.driver_starts += 1

    def _keep_running(self) -> None:
        if self.is_running():
            return
        assert self._driver is not None
        if self._driver.returncode > 0:
            self.failures += 1
            self.tell(f"the driver gave up with status {self._driver.returncode}")
            assert self.failures < 3, f"the query fails by itself; {self.describe()}"
        self._start()

    def _progress(self, batches: int) -> None:
        """Wait until Spark has ended so many further micro-batches."""
        goal, deadline = newest_commit(self.job) + batches, time.monotonic() + _PATIENCE_S
        while newest_commit(self.job) < goal:
            self._keep_running()
            assert time.monotonic() < deadline, f"no micro-batch ends; {self.describe()}"
            time.sleep(0.02)

    def _kill_one(self, kills: int) -> None:
        if not self._next:
            self._next = self.chance.sample(self.victims, len(self.victims))
        victim = self._next[-1]
        moment = self.chance.choice(("any", *_MOMENTS))
        # Drivers take long to start: one that was killed at once has shown nothing.
        self._progress(self.chance.choice((1, 1, 2)) if victim == "driver" else self.chance.choice((0, 1)))
        if moment != "any":
            before = self._newest(moment)
            self.reach(lambda: self._newest(moment) != before, patience_s=10)
        delay_s = self.chance.random() * (0.8 if moment == "any" else 0.05)
        self.reach(lambda: False, patience_s=delay_s)
        if victim == "sink's server":
            self._kill_server(moment)
        else:
            self._strike(victim, moment, wipe=self.chance.random() < 0.2)

    def _newest(self, moment: str) -> float:
        """Return when the newest of a moment's files was made."""
        return max((_modified(path) for path in self.job.path.glob(_MOMENTS[moment])), default=0.0)

    def _strike(self, victim: str, moment: str, *, wipe: bool) -> None:
        self.done.setdefault(victim, 0)
        super()._strike(victim, moment, wipe=wipe)

    def _kill_server(self, moment: str) -> None:
        self.target.kill_server()
        self.done["sink's server"] = self.done.get("sink's server", 0) + 1
        self._next.pop()
        self.tell(f"killed the sink's server, moment: {moment}")
        time.sleep(self.chance.random())
        self.target.start_server()

    def end(self) -> None:
        """Let the query end between two micro-batches."""
        self.job.stop.touch()
        deadline = time.monotonic() + _PATIENCE_S
        while self.is_running() or not self.ended_well():
            self._keep_running()
            assert time.monotonic() < deadline, f"does not end; {self.describe()}"
            time.sleep(0.05)
        self.stop_servers()


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # removed meanwhile
        return 0.0
