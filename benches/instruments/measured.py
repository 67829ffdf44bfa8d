"""Where a run of an engine may write, what it yields, and what its processes use: CPU time, memory, bytes written.

A process that ends keeps its place in the sums, as it was when it was last looked at. On Linux the memory is that of
``/proc/<pid>/smaps_rollup``; elsewhere it is not measured.

rss
    All pages that are in memory, of mapped files too.
pss
    The same, a page that several processes have divided among them; so it can be added up.
anonymous
    Pages that no file backs: what the process itself has asked for. Run files are mapped, so they are not among it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_MEMORY = ("rss", "pss", "anonymous")

Bytes = dict[str, int]


def adopt_orphans() -> None:
    """Keep orphaned descendants below this process, on Linux: a state server outlives the worker that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spark_kind(process: psutil.Process) -> str | None:
    """Return what a process below a Spark driver is: ``jvm``, ``python`` or (state) ``server``; None for the driver."""
    if process.pid == os.getpid() or _stands_for_a_machine(process):
        return None
    if "java" in process.name():
        return "jvm"
    return "server" if any(part.endswith("state_server") for part in process.cmdline()) else "python"


def store_kind(process: psutil.Process) -> str | None:
    """Return what a process of a run without Spark is: ``store`` is this one, the others are its ``background``."""
    if process.pid == os.getpid():
        return "store"
    return None if _stands_for_a_machine(process) else "background"


def _stands_for_a_machine(process: psutil.Process) -> bool:
    """Tell whether a process is a bench's S3 server, which would run elsewhere."""
    return any(part.endswith("instruments.object_store") for part in process.cmdline())


class Processes:
    """The process that makes it and those below, by kind, looked at now and then; a kind of None is left out."""

    def __init__(self, kind_of: Callable[[psutil.Process], str | None]) -> None:
        self._kind_of = kind_of
        self._kinds: dict[psutil.Process, str | None] = {}
        self._seconds: dict[psutil.Process, float] = {}
        self._written: dict[psutil.Process, int] = {}
        self._peaks: dict[str, Bytes] = {}

    def look(self) -> None:
        """Note what every process has used so far, and the memory that it holds now."""
        memory: dict[str, Bytes] = {}
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            try:
                kind = self._note(process)
                held = _memory_of(process.pid) if kind is not None else None
            except psutil.Error:
                continue  # ended between being listed and being asked
            if kind is not None and held:
                of_kind = memory.setdefault(kind, dict.fromkeys(_MEMORY, 0))
                for name, size in held.items():
                    of_kind[name] += size
        for kind, sizes in memory.items():
            before = self._peaks.get(kind, sizes)
            self._peaks[kind] = {name: max(size, before[name]) for name, size in sizes.items()}

    def _note(self, process: psutil.Process) -> str | None:
        with process.oneshot():
            self._kinds[process] = self._kind_of(process)  # each time: a fork is told apart only once it has become it
            times = process.cpu_times()
            self._seconds[process] = times.user + times.system
            if hasattr(process, "io_counters"):  # not on macOS
                self._written[process] = process.io_counters().write_bytes
        return self._kinds[process]

    def seconds(self) -> dict[str, float]:
        """Return seconds so far: of the wall, and of CPU by kind."""
        return {"wall": time.monotonic(), **self._by_kind(self._seconds)}

    def written(self) -> dict[str, float]:
        """Return by kind the bytes that went to a file system on a device so far; RAM is none."""
        return self._by_kind(self._written)

    def _by_kind(self, spent: dict[psutil.Process, Any]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for process, kind in self._kinds.items():
            if kind is not None:
                sums[kind] = sums.get(kind, 0) + spent.get(process, 0)
        return sums

    def peak(self) -> dict[str, Bytes]:
        """Return by kind the largest ``rss``, ``pss`` and ``anonymous`` bytes, each by itself."""
        return self._peaks


def _memory_of(pid: int) -> Bytes:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    sizes = {line.partition(":")[0].lower(): line.split()[1] for line in lines[1:]}
    return {name: int(sizes[name]) * 1024 for name in _MEMORY}


def since(before: dict[str, float], after: dict[str, float], digits: int = 3) -> dict[str, float]:
    """Return how much each sum has grown."""
    return {name: round(after[name] - before.get(name, 0), digits) for name in after}


@dataclass(frozen=True)
class Places:
    """Where a run may write: on disk; in memory where the machine has room."""

    disk: Path
    memory: Path

    @property
    def checkpoint(self) -> Path:
        """The query's checkpoint location."""
        return self.disk / "checkpoint"


@dataclass(frozen=True)
class Measured:
    """What one run yields; JSON values. What is used is counted over the counted micro-batches, memory over the run."""

    batch_ms: list[float]  # every micro-batch, those that fill the state and warm-up included
    phases_ms: list[dict[str, float]]  # of each micro-batch, its parts: of a query, those of Spark's progress
    cpu: dict[str, float]  # seconds by kind of process, and of the wall
    memory: dict[str, dict[str, int]]  # by kind of process the largest rss, pss and anonymous bytes
    #: Bytes written to disk by kind of process, and ``durable``: by how much that grew from which state is restored.
    written: dict[str, float]
    settings: dict[str, str]
    state_bytes: dict[str, Any]  # as of `state_bytes`
    #: Where it is counted: requests to the durable storage by kind, bytes each way, files of Spark's own checkpoint.
    storage: dict[str, float] = field(default_factory=dict)
    start_ms: float | None = None  # from the start of the engine's process until it begins to read, if measured
    #: What of this run's result was compared with what is right, how many rows, and that they were equal.
    equality: dict[str, Any] = field(default_factory=dict)


def state_bytes(local: list[int], after_batch: list[int], live: int | None = None) -> dict[str, Any]:
    """Return the sizes of the local state: at its peak, at the end, after each micro-batch, and by the `live` one."""
    peak = max(local)
    return {
        "live_arrow": live,
        "local_final": local[-1],
        "local_peak": peak,
        "ratio": None if live is None else round(peak / max(live, 1), 3),
        "after_batch": after_batch,
    }


class StoreWatch:
    """What a run without Spark takes, part by part, and uses from its first counted micro-batch on."""

    def __init__(self, settings: Mapping[str, str], warmup: int) -> None:
        self._settings, self._warmup = dict(settings), warmup
        self._processes = Processes(store_kind)
        self._sizes: list[int] = []
        self._batch_ms: list[float] = []
        self._phases_ms: list[dict[str, float]] = []
        self._count_from_here()

    def _count_from_here(self) -> None:
        self._processes.look()
        self._before = self._processes.seconds(), self._processes.written()

    def begin(self) -> None:
        """Begin a micro-batch; what the ones before the first counted one used is forgotten, but for memory."""
        if len(self._batch_ms) == self._warmup:
            self._count_from_here()
        self._batch_ms.append(0.0)
        self._phases_ms.append({})

    def note(self, name: str, ms: float, *, counts: bool = False) -> None:
        """Note what a part took; the time of the micro-batch is the sum of those that count."""
        self._phases_ms[-1][name] = ms
        if counts:
            self._batch_ms[-1] = round(self._batch_ms[-1] + ms, 2)

    @contextmanager
    def part(self, name: str, *, counts: bool = False) -> Iterator[None]:
        """Time a part."""
        start = time.perf_counter()
        yield
        self.note(name, round((time.perf_counter() - start) * 1000, 2), counts=counts)

    def look(self, local_bytes: int) -> None:
        """Note what is used now, and how large the local state is."""
        self._processes.look()
        self._sizes.append(local_bytes)

    def measured(self, storage: dict[str, float]) -> Measured:
        """Return what was measured until now; there was a look at least."""
        self._processes.look()
        return Measured(
            batch_ms=self._batch_ms,
            phases_ms=self._phases_ms,
            cpu=since(self._before[0], self._processes.seconds()),
            memory=self._processes.peak(),
            written=since(self._before[1], self._processes.written()),
            settings=self._settings,
            state_bytes=state_bytes(self._sizes, self._sizes),
            storage=storage,
        )
