"""Where a run of an engine may write, and what it yields."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.benches.instruments.processes import Processes, since, store_kind


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
