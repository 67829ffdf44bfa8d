"""Runs `killed_driver` over many files while killing its processes, and computes what must come of it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tests.faults import killed_driver
from tests.faults.killed_driver import ROWS_MAX, Job
from tests.input_files import add_file

VICTIMS = ("driver", "worker", "server")
FILE_ROWS, KEYS = 400, 150
# Event time: ten seconds a file.
USERS, FIRST_MS, FILE_MS = 300, 1_700_000_000_000, 10_000
_ROOT = Path(__file__).parents[2]
RUN_MARK = "HOLDFAST_TEST_RUN"
_POLL_S = 0.01
_PATIENCE_S = 240.0


@dataclass
class Killings:
    """One run of the query, and what was done to it."""

    job: Job
    #: Decides whom to kill, when, and whether local state is lost as well.
    chance: random.Random
    #: Whom to kill, each as often as the others.
    victims: tuple[str, ...] = VICTIMS
    #: Whether a micro-batch must have been committed between two kills.
    once_a_batch: bool = False
    #: Module of the driver's program.
    program: str = killed_driver.__name__
    #: Beginning of a command that runs the driver elsewhere.
    within: tuple[str, ...] = ()
    #: What was done, to show when the result is wrong.
    story: list[str] = field(default_factory=list)
    #: Kills by victim.
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VICTIMS, 0))
    files: int = 0
    failures: int = 0
    #: Micro-batches that were committed when the last driver started.
    committed_before: int = 0
    _next: list[str] = field(default_factory=list)
    _driver: subprocess.Popen[bytes] | None = None

    def run(self, kills: int) -> None:
        """Run until so many processes were killed and all files are through."""
        self.add_files(8)
        with self.cleaned_up():
            while True:
                self.start_driver()
                while self.is_running() and sum(self.done.values()) < kills:
                    self._kill_one(kills)
                self.wait_for_the_end()
                if sum(self.done.values()) >= kills and self.ended_well():
                    return
                if self.ended_well():
                    self.add_files(8)

    def add_files(self, number: int) -> None:
        for i in range(self.files, self.files + number):
            add_file(self.job.path / "input", i, input_of(i))
        self.files += number

    def start_driver(self) -> None:
        """Start the query's driver in a process group of its own."""
        command = [*self.within, sys.executable, "-m", self.program, json.dumps(asdict(self.job))]
        environment = {**os.environ, RUN_MARK: self.job.folder, "PYTHONPATH": str(_ROOT)}
        self.committed_before = self.count("query/commits/[0-9]*")
        with (self.job.path / "driver.log").open("ab") as log:
            self._driver = subprocess.Popen(
                command,
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.tell("started a driver")

    def is_running(self) -> bool:
        return self._driver is not None and self._driver.poll() is None

    @property
    def ended_with(self) -> int | None:
        """The driver's exit status, negative for a signal; None while it runs."""
        return self._driver.returncode if self._driver else None

    def ended_well(self) -> bool:
        return self.ended_with == 0

    def wait_for_the_end(self) -> None:
        assert self._driver is not None
        if self._driver.wait() > 0:
            self.failures += 1
            self.tell(f"the query failed with status {self._driver.returncode}")
            if self.failures > sum(self.done.values()):
                raise AssertionError(f"the query fails by itself; {self.describe()}")

    def _kill_one(self, kills: int) -> None:
        """Kill one process at a random moment: any, or when a commit has just reached durable storage."""
        waits = self.once_a_batch or not any(self.done.values())
        batches = self.count("query/commits/[0-9]*") if waits else 0
        if not self._next:
            self._next = self.chance.sample(self.victims, len(self.victims))
        victim = self._next[-1]
        moment = self.chance.choice(("any", "durable commit", "Spark's offsets", "Spark's state"))
        wipe = self.chance.random() < 0.3
        delay_s = self.chance.random() * 1.5
        if waits and not self.reach(lambda: self.count("query/commits/[0-9]*") > batches):
            return
        patterns = {"durable commit": "durable/*/*/commits/[0-9]*", "Spark's offsets": "query/offsets/[0-9]*"}
        pattern = patterns.get(moment, "query/state/0/*/*")
        if moment == "any":
            self.reach(lambda: False, patience_s=delay_s)
        else:
            before = self.count(pattern)
            self.reach(lambda: self.count(pattern) > before, patience_s=10)
        self._strike(victim, moment, wipe=wipe)

    def _strike(self, victim: str, moment: str, *, wipe: bool) -> None:
        processes = {"driver": self._drivers, "worker": self._workers, "server": self._servers}
        chosen = (processes | {"executor": self._executors})[victim]()
        if not chosen or not self.is_running():
            return
        self.done[victim] += 1
        self._next.pop()
        process = self.chance.choice(chosen)
        if victim == "driver":
            os.killpg(process, signal.SIGKILL)
        else:
            os.kill(process, signal.SIGKILL)
        if wipe:
            for directory in (self.job.path / "local").glob("*/executor-*"):
                shutil.rmtree(directory, ignore_errors=True)
        self.tell(f"killed {victim} {process}, moment: {moment}{', and removed all local state' if wipe else ''}")

    def reach(self, condition: object, patience_s: float = _PATIENCE_S) -> bool:
        assert callable(condition)
        deadline = time.monotonic() + patience_s
        while self.is_running() and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(_POLL_S)
        return False

    def count(self, pattern: str) -> int:
        return sum(1 for _ in self.job.path.glob(pattern))

    def _drivers(self) -> list[int]:
        return [self._driver.pid] if self._driver else []

    def _workers(self) -> list[int]:
        daemons_and_workers = self.processes(killed_driver.DAEMON)
        return [pid for pid, parent in daemons_and_workers.items() if parent in daemons_and_workers]

    def _servers(self) -> list[int]:
        return list(self.processes("holdfast.spark_integration.server.state_server"))

    def _executors(self) -> list[int]:
        return list(self.processes("org.apache.spark.executor.CoarseGrainedExecutorBackend"))

    def processes(self, module: str) -> dict[int, int]:
        """Return the processes of this run that were started with ``-m module``, each with its parent."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if module in process.cmdline() and process.environ().get(RUN_MARK) == self.job.folder:
                    found[process.pid] = process.ppid()
        return found

    def stop_servers(self) -> None:
        """Kill the state servers that the last driver has left, and wait until they are gone."""
        for pid in self._servers():
            with suppress(psutil.NoSuchProcess):
                server = psutil.Process(pid)
                server.kill()
                server.wait(_PATIENCE_S)

    def tell(self, event: str) -> None:
        self.story.append(f"{time.strftime('%H:%M:%S')} after {self.count('query/commits/*')} micro-batches: {event}")

    def describe(self) -> str:
        """Return the story and the end of the driver's log."""
        log = (self.job.path / "driver.log").read_text(errors="replace").splitlines()[-40:]
        return "\n".join([f"killed {self.done}, the query failed {self.failures} times", *self.story, "log:", *log])

    @contextmanager
    def cleaned_up(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._driver is not None and self._driver.poll() is None:
                os.killpg(self._driver.pid, signal.SIGKILL)
                self._driver.wait()


def input_of(number: int) -> pa.Table:
    """Return the rows of one file: every tenth key is null, which is a key like others."""
    chance = np.random.default_rng(number)
    keys = chance.integers(0, KEYS, FILE_ROWS)
    columns = {
        "key": pa.array(keys, mask=keys % 10 == 0),
        "amount": pa.array(chance.integers(-1000, 1000, FILE_ROWS)),
        "seq": pa.array(np.arange(FILE_ROWS) + number * FILE_ROWS),
        **_visits(number, chance),
    }
    return pa.table(columns)


def _visits(number: int, chance: np.random.Generator) -> dict[str, pa.Array]:
    """Return users who come, stay for some files and go, and the event times of their rows, some a minute late."""
    users = (number * 20 + chance.integers(0, 60, FILE_ROWS)) % USERS
    times_ms = chance.integers(0, FILE_MS, FILE_ROWS) + number * FILE_MS + FIRST_MS
    times_ms -= np.where(chance.random(FILE_ROWS) < 0.02, 60_000, 0)
    return {
        "user": pa.array(users, mask=users == 7),
        "at": pa.array(times_ms, pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
    }


def rows_of(batch: MicroBatch) -> list[dict[str, Any]]:
    return [row for file in batch.files for row in input_of(file).to_pylist()]


Output = dict[int, list[tuple[int | None, int, int]]]
State = dict[int | None, tuple[int, int, int]]


@dataclass(frozen=True)
class MicroBatch:
    """What Spark planned for one micro-batch."""

    #: Its input; one file, but for a driver that is killed before it has planned a micro-batch: Spark then takes its
    #: file and the next one together. A micro-batch without data has none.
    files: range
    #: Its processing time.
    time_ms: int
    watermark_ms: int


def micro_batches(folder: Path) -> list[MicroBatch]:
    """Return the micro-batches of a query, from Spark's own log."""
    offsets = folder / "query" / "offsets"
    batches, start = [], 0
    for number in range(sum(path.name.isdigit() for path in offsets.iterdir())):
        metadata, source = map(json.loads, (offsets / str(number)).read_text().splitlines()[-2:])
        end = source["logOffset"] + 1
        batches.append(MicroBatch(range(start, end), metadata["batchTimestampMs"], metadata["batchWatermarkMs"]))
        start = end
    return batches


def expected(
    batches: list[MicroBatch], after_each: Callable[[int, State], None] = lambda _number, _state: None
) -> tuple[State, Output]:
    """Compute, one row after the other, the state at the end and what each micro-batch returns."""
    state: State = {}
    output: Output = {}
    for number, batch in enumerate(batches):
        touched: State = {}
        for row in rows_of(batch):
            n, total, _ = touched.get(row["key"]) or state.get(row["key"]) or (0, 0, 0)
            touched[row["key"]] = (n + 1, total + row["amount"], row["seq"])
        output[number] = sorted(((k, n, total) for k, (n, total, _) in touched.items()), key=repr)
        for key, values in touched.items():
            if values[0] >= ROWS_MAX:
                state.pop(key, None)
            else:
                state[key] = values
        after_each(number, state)
    return state, output


def found_output(folder: Path) -> Output:
    return {
        int(path.name.removeprefix("batch=")): sorted(
            (tuple(row.values()) for row in pq.read_table(str(path), partitioning=None).to_pylist()), key=repr
        )
        for path in (folder / "output").glob("batch=*")
    }
