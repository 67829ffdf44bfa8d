"""The measurements of a run, and the resources of its processes: CPU time, memory, bytes written.

Sums include ended processes, as last observed. Memory is read from ``/proc/<pid>/smaps_rollup`` on Linux and not
measured elsewhere.

rss
    Resident pages, including mapped files.
pss
    The same, with shared pages divided among processes, so that it can be summed.
anonymous
    Pages without a file: memory that the process allocated. Run files are mapped and do not count.
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
    """Keep orphaned descendants below this process on Linux: a state server outlives the worker that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spark_kind(process: psutil.Process) -> str | None:
    """Return a process's kind below a Spark driver: ``jvm``, ``python``, (state) ``server``, None for the driver."""
    if process.pid == os.getpid() or _stands_for_a_machine(process):
        return None
    if "java" in process.name():
        return "jvm"
    return "server" if any(part.endswith("state_server") for part in process.cmdline()) else "python"


def store_kind(process: psutil.Process) -> str | None:
    """Return the kind of a process of a run without Spark: ``store`` for this process, ``background`` for others."""
    if process.pid == os.getpid():
        return "store"
    return None if _stands_for_a_machine(process) else "background"


def _stands_for_a_machine(process: psutil.Process) -> bool:
    """Return whether a process is the bench's S3 server, which represents a different machine."""
    return any(part.endswith("instruments.object_store") for part in process.cmdline())


class Processes:
    """Samples the resources of this process and its descendants by kind; processes of kind None do not count."""

    def __init__(self, kind_of: Callable[[psutil.Process], str | None]) -> None:
        self._kind_of = kind_of
        self._kinds: dict[psutil.Process, str | None] = {}
        self._seconds: dict[psutil.Process, float] = {}
        self._written: dict[psutil.Process, int] = {}
        self._peaks: dict[str, Bytes] = {}

    def look(self) -> None:
        """Sample what every process has used so far, and its current memory."""
        memory: dict[str, Bytes] = {}
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            try:
                kind = self._note(process)
                held = _memory_of(process.pid) if kind is not None else None
            except psutil.Error:
                continue  # it has ended
            if kind is not None and held:
                of_kind = memory.setdefault(kind, dict.fromkeys(_MEMORY, 0))
                for name, size in held.items():
                    of_kind[name] += size
        for kind, sizes in memory.items():
            before = self._peaks.get(kind, sizes)
            self._peaks[kind] = {name: max(size, before[name]) for name, size in sizes.items()}

    def _note(self, process: psutil.Process) -> str | None:
        with process.oneshot():
            self._kinds[process] = self._kind_of(process)  # each time, since a fork's kind changes with exec
            times = process.cpu_times()
            self._seconds[process] = times.user + times.system
            if hasattr(process, "io_counters"):  # not on macOS
                self._written[process] = process.io_counters().write_bytes
        return self._kinds[process]

    def seconds(self) -> dict[str, float]:
        """Return wall time and CPU time by kind, in seconds so far."""
        return {"wall": time.monotonic(), **self._by_kind(self._seconds)}

    def written(self) -> dict[str, float]:
        """Return the bytes written to disks so far by kind."""
        return self._by_kind(self._written)

    def _by_kind(self, spent: dict[psutil.Process, Any]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for process, kind in self._kinds.items():
            if kind is not None:
                sums[kind] = sums.get(kind, 0) + spent.get(process, 0)
        return sums

    def peak(self) -> dict[str, Bytes]:
        """Return the independent maxima of ``rss``, ``pss`` and ``anonymous`` bytes by kind."""
        return self._peaks


def _memory_of(pid: int) -> Bytes:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    sizes = {line.partition(":")[0].lower(): line.split()[1] for line in lines[1:]}
    return {name: int(sizes[name]) * 1024 for name in _MEMORY}


def since(before: dict[str, float], after: dict[str, float], digits: int = 3) -> dict[str, float]:
    return {name: round(after[name] - before.get(name, 0), digits) for name in after}


@dataclass(frozen=True)
class Places:
    """The directories of a run, on disk and in RAM."""

    disk: Path
    memory: Path

    @property
    def checkpoint(self) -> Path:
        return self.disk / "checkpoint"


@dataclass(frozen=True)
class Measured:
    """The measurements of one run as JSON values: resources of the counted micro-batches, memory of the whole run."""

    batch_ms: list[float]  # all micro-batches, including those that fill the state and warm-up
    phases_ms: list[dict[str, float]]  # by micro-batch; of queries, the durations in Spark's progress
    cpu: dict[str, float]  # seconds by kind of process, and ``wall``
    memory: dict[str, dict[str, int]]  # peak rss, pss and anonymous bytes by kind of process
    #: Bytes written to disk by kind of process, and ``durable``, the growth of the durable state.
    written: dict[str, float]
    settings: dict[str, str]
    state_bytes: dict[str, Any]  # see `state_bytes`
    #: If counted: requests to the durable storage by kind, bytes in each direction, files of Spark's checkpoint.
    storage: dict[str, float] = field(default_factory=dict)
    start_ms: float | None = None  # from the start of the engine's process to its first read, if measured
    #: What was compared with the expected result, the number of rows, and that they are equal.
    equality: dict[str, Any] = field(default_factory=dict)


def state_bytes(local: list[int], after_batch: list[int], live: int | None = None) -> dict[str, Any]:
    """Return the sizes of the local state: peak, final, after each micro-batch, and peak / `live` state."""
    peak = max(local)
    return {
        "live_arrow": live,
        "local_final": local[-1],
        "local_peak": peak,
        "ratio": None if live is None else round(peak / max(live, 1), 3),
        "after_batch": after_batch,
    }


class StoreWatch:
    """Measures a run without Spark: the time of each phase, and the resources of the counted micro-batches."""

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
        """Start a micro-batch; the first counted one resets all resources except memory."""
        if len(self._batch_ms) == self._warmup:
            self._count_from_here()
        self._batch_ms.append(0.0)
        self._phases_ms.append({})

    def note(self, name: str, ms: float, *, counts: bool = False) -> None:
        """Note the time of a phase; the micro-batch's time is the sum of the phases that count."""
        self._phases_ms[-1][name] = ms
        if counts:
            self._batch_ms[-1] = round(self._batch_ms[-1] + ms, 2)

    @contextmanager
    def part(self, name: str, *, counts: bool = False) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.note(name, round((time.perf_counter() - start) * 1000, 2), counts=counts)

    def look(self, local_bytes: int) -> None:
        """Sample the resources and note the size of the local state."""
        self._processes.look()
        self._sizes.append(local_bytes)

    def measured(self, storage: dict[str, float]) -> Measured:
        """Return the measurements, after at least one `look`."""
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
