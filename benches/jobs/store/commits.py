"""Commits to the store alone, without Spark, while the state grows: how long one is held back at worst.

Each micro-batch reads the state of its keys, half of which are new, and commits. Between two of them nothing waits, so
that merges, flushes and compaction fall behind if they can; they run as they do below a state server: in another
process, or, where a backend has one owner, in threads of this one.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import click
import numpy as np
import pyarrow as pa

from holdfast import clock
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Keys
from holdfast.benches.instruments.measured import Measured, Places
from holdfast.benches.instruments.store_watch import StoreWatch
from holdfast.benches.jobs.job import StoreJob, option
from holdfast.benches.jobs.rows import TABLE, keys_of, table_of, values_of
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.mvcc import VersionedStore

_LOOK_EVERY = 10


@dataclass(frozen=True)
class Commits(StoreJob):
    """See the module."""

    name = "stalls"

    rows: int = option(20_000, "rows of a commit")
    keys: int = option(2_000_000, "keys in the state at the end")
    batches: int = option(200, "commits")
    warmup: int = option(10, "first of these, which are not counted")
    memory_mb: int | None = option(512, "MiB of memory for the rocksdb backend", click.IntRange(1))
    value_bytes: int = option(92, "bytes of a value")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batches <= self.keys <= self.rows * self.batches or self.value_bytes < 16:
            raise InvalidArgumentError(
                "the commits must be able to write all keys, and a value has at least 16 bytes", job=self.stored()
            )

    def numbers(self, batch: int, chance: np.random.Generator) -> np.ndarray:
        """Return which keys a commit touches: new ones in turn, and old ones drawn evenly."""
        first, end = (self.keys * i // self.batches for i in (batch, batch + 1))
        old = chance.integers(0, end, self.rows - (end - first))
        return np.unique(np.concatenate([old, np.arange(first, end)]))

    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        """Commit to one shard of a backend as fast as it goes."""
        table = table_of(self.value_bytes)
        kind = find_backend(backend_name)
        directory = (places.memory if kind.in_memory else places.disk) / "shard-0000"
        chance, watch = np.random.default_rng(0), StoreWatch()
        batch_ms, phases_ms = [], []
        pointer = None
        open_backend = BackendOpener(backend_name, directory, dict(options), self.value_bytes)
        with open_backend() as backend, Background.of(backend, open_backend) as background:
            store = VersionedStore(backend)
            for batch in range(self.batches):
                keys = keys_of(table, self.numbers(batch, chance))
                values = values_of(table, len(keys), self.value_bytes, chance)
                if batch == self.warmup:
                    watch.count_from_here()
                pointer, phases = _micro_batch(store, pointer, keys, values)
                background.announce(pointer)
                batch_ms.append(round(sum(phases.values()), 2))
                phases_ms.append(phases)
                if batch % _LOOK_EVERY == 0 or batch == self.batches - 1:
                    watch.look(backend.statistics().local_bytes)
            return watch.measured(phases_ms, batch_ms, {"backend": backend_name, **options})


def _micro_batch(
    store: VersionedStore, pointer: Pointer | None, keys: Keys, values: pa.RecordBatch
) -> tuple[Pointer, dict[str, float]]:
    """Do to the store what one shard call does, and return what each part took."""
    marks = [time.perf_counter()]
    with store.begin(pointer) as transaction:
        if pointer is not None:
            store.prune(pointer)
        marks.append(time.perf_counter())
        transaction.get(TABLE, keys)
        marks.append(time.perf_counter())
        transaction.put(TABLE, keys, values)
        committed = transaction.commit()
    marks.append(time.perf_counter())
    assert committed is not None
    parts = zip(("begin", "get", "commit"), np.diff(marks), strict=True)
    return committed, {part: round(float(seconds) * 1000, 2) for part, seconds in parts}


@dataclass(frozen=True)
class BackendOpener:
    """Opens one shard's backend, in this process or another."""

    name: str
    directory: Path
    options: dict[str, str]
    value_bytes: int

    def __call__(self) -> Backend:
        """Return the backend, newly opened."""
        tables = {TABLE: table_of(self.value_bytes)}
        return find_backend(self.name)(self.directory, tables, clock.new_id, self.options)


@dataclass
class Background:
    """Maintains the newest version that was announced, one at a time; a context manager, which ends with its work."""

    executor: Executor
    maintain: Callable[[Pointer], int]
    working: Future[int] | None = field(default=None, init=False)

    @classmethod
    def of(cls, backend: Backend, open_backend: BackendOpener) -> Background:
        """Return the background work of a backend: in this process only if it has one owner."""
        if backend.has_one_owner:
            return cls(ThreadPoolExecutor(1), backend.maintain)
        spawned = multiprocessing.get_context("spawn")
        return cls(ProcessPoolExecutor(1, spawned), _MaintainElsewhere(open_backend))

    def announce(self, pointer: Pointer) -> None:
        """Begin to maintain a version, unless an older one is still worked on."""
        if self.working is None or self.working.done():
            self._take_result()
            self.working = self.executor.submit(self.maintain, pointer)

    def _take_result(self) -> None:
        if self.working is not None:
            with suppress(NotFoundError):  # dropped before its turn came
                self.working.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._take_result()
        self.executor.shutdown()


@dataclass(frozen=True)
class _MaintainElsewhere:
    open_backend: BackendOpener

    def __call__(self, pointer: Pointer) -> int:
        with self.open_backend() as backend:
            return backend.maintain(pointer)
