"""A driver without Spark, which costs a fork: a real sink, its coordinator, and workers, on a machine of their own.

::

    forkserver ─▶ process that leaves its namespaces ─▶ driver, number 1 of its own ─▶ a worker for each partition

    <folder>/durable       the state directory
    <folder>/ended/<n>     Spark's log: micro-batch n has ended. No driver is kept from writing it
    <folder>/ends/<name>   how a driver ended
    <folder>/stop          drivers end after the micro-batch in progress

What a driver of Spark does between two requests takes time, here a few random milliseconds. Tasks fail and are repeated
as in Spark; one in ten is repeated although it has prepared, as if its answer had been lost.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

import pyarrow as pa

from holdfast import clock
from holdfast.errors import HoldfastError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.executor.processes import ProcessId
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery
from holdfast.spark_integration.sinks.writing import prepared_of, write_rows
from tests.faults.sinks.judging import right_totals
from tests.faults.sinks.killed_at import Stepping
from tests.faults.sinks.killed_query import KEYS
from tests.faults.sinks.targets import SCHEMA, Place, target_of
from tests.model.sink_target import Crash, CrashingStorage

PARTS = 2
_ATTEMPTS = 4
_TWINS = 0.1
_REQUEST_MS, _STEP_MS = 3.0, 6.0
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWPID = 0x20000, 0x4000000, 0x20000000
_MS_PRIVATE_ALL, _PR_SET_PDEATHSIG = 0x44000, 1


@dataclass(frozen=True)
class Job:
    """What a driver is to do."""

    folder: str
    target: str
    place: Place
    query_id: str
    #: The driver's, and its machine's.
    name: str
    seed: str
    #: After how many micro-batches it ends, or not before it is told to.
    batches: int | None = None

    @property
    def path(self) -> Path:
        return Path(self.folder)

    def first_batch(self) -> int:
        return max((int(path.name) for path in (self.path / "ended").iterdir()), default=-1) + 1


def keys_of(batch_id: int) -> list[int]:
    """Return the keys of a micro-batch: two of its own, so that a table by key shows each, and two of the next one."""
    return [(2 * batch_id + i) % KEYS for i in range(4)]


def run(job: Job) -> NoReturn:
    """Run the driver on a machine of its own; ends with its status."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *given: object) -> None:
        if getattr(libc, name)(*given):
            raise OSError(ctypes.get_errno(), f"{name} failed")

    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWPID)
    if driver := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1]) & 0xFF)
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    call("mount", b"none", b"/", None, _MS_PRIVATE_ALL, None)
    call("mount", b"proc", b"/proc", b"proc", 0, None)
    socket.sethostname(job.name)
    end: dict[str, object] = {"error": None}
    try:
        end["left"] = _Driver(job).run()
    except BaseException as exc:  # noqa: BLE001  it is judged
        end = {"error": type(exc).__name__, "message": str(exc), "trace": traceback.format_exc()}
    (job.path / "ends" / job.name).write_text(json.dumps(end))
    os._exit(end["error"] is not None)


class _Linger(Crash):
    """Lets time go by before each request to the state directory."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    @contextmanager
    def around(self) -> Iterator[None]:
        time.sleep(self._chance.expovariate(1000 / _REQUEST_MS))
        yield


@dataclass(frozen=True)
class _Lingering(Stepping):
    """Lets time go by at each step."""

    chance: random.Random

    def reach(self, step: str) -> None:
        time.sleep(self.chance.expovariate(1000 / _STEP_MS))


class _Part(NamedTuple):
    partition: int
    rows: int
    handle: str


class _Driver:
    def __init__(self, job: Job) -> None:
        self._job, self._chance = job, random.Random(f"{job.seed} {job.name}")
        self._target = target_of(job.target)
        self._sink = _Lingering(self._target.sink(job.place), self._chance)
        options = dict(self._target.options(job.place))
        self._query = SinkQuery(self._sink.name, job.query_id, options=options)
        # Before there is any thread or connection.
        self._workers = [self._fork(part) for part in range(PARTS)]

    def run(self) -> int:
        """Run micro-batches; return how many handles are left that nobody has decided."""
        with open_storage(str(self._job.path / "durable")) as storage:
            slow = CrashingStorage(storage, _Linger(self._chance))
            coordinator = Coordinator(self._sink, self._query, slow, retained=3, process=ProcessId.of(os.getpid()))
            first, decided, spares = self._job.first_batch(), tuple[Handle, ...](), tuple[Handle, ...]()
            coordinator.start(first, self._rows(first, 0).schema)
            for batch_id in itertools.count(first):
                if not coordinator.is_decided(batch_id):
                    try:
                        prepared = self._prepare(batch_id, spares)
                    except HoldfastError:
                        coordinator.give_up()
                        raise
                    coordinator.finish(batch_id, prepared)
                    decided, spares = prepared.handles, prepared.unused + decided
                (self._job.path / "ended" / str(batch_id)).touch()
                if batch_id - first + 1 == self._job.batches or (self._job.path / "stop").exists():
                    return sum(handle not in decided for handle in self._sink.leftovers(self._query))
        raise AssertionError

    def _prepare(self, batch_id: int, spares: Sequence[Handle]) -> Prepared:
        """Have the tasks run side by side, each as often as it takes."""
        waiting, parts = dict.fromkeys(range(PARTS), 0), list[_Part]()
        given = {part: spare for part, spare in enumerate(spares) if part < PARTS}
        is_repeated = False
        while waiting:
            for part, attempt in waiting.items():
                self._workers[part].send((batch_id, given.get(part) if not attempt else None))
            for part in list(waiting):
                found = self._workers[part].recv()
                waiting[part] += 1
                if isinstance(found, HoldfastError):
                    if waiting[part] == _ATTEMPTS:
                        raise found
                elif waiting[part] == _ATTEMPTS or self._chance.random() > _TWINS:
                    parts.append(_Part(part, *found))
                    del waiting[part]
            is_repeated |= bool(waiting)
        return replace(prepared_of(parts, repeated=is_repeated), unused=tuple(spares[PARTS:]))

    def _fork(self, part: int) -> Connection:
        here, there = Pipe()
        if os.fork():
            return here
        try:
            while True:
                batch_id, spare = there.recv()
                attempt = SinkAttempt(self._query, batch_id, part, clock.new_id() + clock.new_id())
                rows = self._rows(batch_id, part)
                try:
                    there.send(write_rows(self._sink, attempt, rows.schema, [rows], spare))
                except HoldfastError as exc:
                    there.send(exc)
        finally:
            traceback.print_exc()
            os._exit(1)

    def _rows(self, batch_id: int, part: int) -> pa.RecordBatch:
        """Return a partition's rows as `killed_query` has them, with another attempt each time."""
        attempt, found = clock.new_id(), []
        for key in keys_of(batch_id):
            if key % PARTS == part:
                n, total = right_totals(key, batch_id)
                row = (key, batch_id, n, total, part, self._job.name, attempt)
                found.append(dict(zip(SCHEMA.names, row, strict=True)))
        return self._target.written(pa.RecordBatch.from_pylist(found, SCHEMA))
