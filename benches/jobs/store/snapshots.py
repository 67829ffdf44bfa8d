"""One shard by the store alone, without Spark: what snapshots send, how fast they come back, and what size costs.

`Snapshots`: the state is filled, and after each commit of a few changed keys a snapshot is written; files that the one
before it has stored are not sent again. `Restore`: a state that is in the storage only is restored on an empty
directory, in turns with a plain download of the same objects to files, by as many threads. `Size`: micro-batches on a
state of some size, its snapshot and its restore.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pyarrow as pa

from holdfast import clock
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.block_io import write_at
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Keys
from holdfast.benches.instruments.measured import Measured, Places
from holdfast.benches.instruments.object_store import ObjectStore
from holdfast.benches.instruments.store_watch import StoreWatch
from holdfast.benches.jobs.job import StoreJob, option
from holdfast.benches.jobs.requests import server_of_environment
from holdfast.benches.jobs.rows import TABLE, hashes_of, keys_of, table_of, values_of
from holdfast.errors import CorruptionError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage

FULL_BYTES, NEW_BYTES, RESTORE_MS = "bytes of a snapshot", "bytes sent for it", "restore, ms"
_THREADS = 8
_FILL_ROWS = 500_000
_SHARD = "bench/shard-0000"


@dataclass(frozen=True)
class Snapshots(StoreJob):
    """See the module."""

    name = "snapshots"

    rows: int = option(20_000, "keys that change between two snapshots")
    keys: int = option(2_000_000, "keys in the state")
    batches: int = option(50, "snapshots")
    warmup: int = option(25, "first of these, which are not counted")
    memory_mb: int | None = option(512, "MiB of memory for the rocksdb backend", click.IntRange(1))
    value_bytes: int = option(92, "bytes of a value")

    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        """Write snapshots to local disk, one after another."""
        chance, watch = np.random.default_rng(0), StoreWatch()
        phases_ms, sizes = [], []
        with _shard(self, backend_name, options, places) as shard:
            pointer = shard.fill(self.keys, chance)
            for batch in range(self.batches):
                if batch == self.warmup:
                    watch.count_from_here()
                numbers = np.sort(chance.choice(self.keys, self.rows, replace=False))
                marks = [time.perf_counter()]
                pointer = shard.commit(shard.store, pointer, numbers, chance)
                marks.append(time.perf_counter())
                shard.backend.maintain(pointer)
                marks.append(time.perf_counter())
                _, manifest = shard.log.write_snapshot(shard.backend, pointer)
                marks.append(time.perf_counter())
                phases_ms.append(_parts(("commit", "maintain", "snapshot"), marks))
                sizes.append((manifest.stored_bytes, manifest.new_bytes))
                watch.look(shard.backend.statistics().local_bytes)
            full, new = (sum(size[i] for size in sizes[self.warmup :]) for i in (0, 1))
            snapshot_ms = [phases["snapshot"] for phases in phases_ms]
            storage = {FULL_BYTES: full, NEW_BYTES: new}
            return watch.measured(phases_ms, snapshot_ms, {"backend": backend_name, **options}, **storage)


@dataclass(frozen=True)
class Restore(StoreJob):
    """See the module."""

    name = "restore"

    rows: int = option(10_000_000, "keys in the state, all of which are restored: 1 GB")
    keys: int = option(10_000_000, "the same")
    batches: int = option(5, "restores")
    warmup: int = option(1, "first of these, which are not counted")
    memory_mb: int | None = option(512, "MiB of memory for the rocksdb backend", click.IntRange(1))
    value_bytes: int = option(92, "bytes of a value")
    state_dir: str | None = option(None, "where the state is durable, as s3://bucket/bench; by default on local disk")
    serves: bool = option(False, "starts an S3 server with s3://bucket, unless the environment names one")

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", self.rows)
        super().__post_init__()

    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        """Restore again and again, each time in a new directory."""
        chance, watch = np.random.default_rng(0), StoreWatch()
        with serving(self.serves), _shard(self, backend_name, options, places, self.state_dir) as shard:
            pointer = shard.commit(shard.store, shard.fill(self.keys, chance), np.arange(1), chance)
            _, manifest = shard.log.write_snapshot(shard.backend, pointer)
            watch.look(shard.backend.statistics().local_bytes)
            pointer = shard.commit(shard.store, pointer, np.arange(1), chance)
            shard.lose_local_state()
            phases_ms = []
            for batch in range(self.batches):
                if batch == self.warmup:
                    watch.count_from_here()
                plain_ms = shard.download_ms(places.disk / "plain")
                phases_ms.append({"restore": shard.restore_ms(pointer, self.keys), "plain download": plain_ms})
            storage = {FULL_BYTES: manifest.stored_bytes * len(self.counted)}
            restore_ms = [phases["restore"] for phases in phases_ms]
            return watch.measured(phases_ms, restore_ms, {"backend": backend_name, **options}, **storage)


@dataclass(frozen=True)
class Size(StoreJob):
    """See the module."""

    name = "size"

    rows: int = option(100_000, "keys of a micro-batch, drawn evenly from all")
    keys: int = option(1_000_000, "keys in the state")
    batches: int = option(8, "micro-batches of a run")
    warmup: int = option(2, "first of these, which are not counted")
    memory_mb: int | None = option(512, "MiB of memory for the rocksdb backend", click.IntRange(1))
    value_bytes: int = option(92, "bytes of a value")

    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        """Read, write and commit to local disk; then store a snapshot, and restore it in a new directory.

        A micro-batch is its look-up and its commit: what merges is another process below a state server.
        """
        chance, phases_ms = np.random.default_rng(0), []
        with _shard(self, backend_name, options, places) as shard:
            pointer = shard.fill(self.keys, chance, in_order=True)
            pa.default_memory_pool().release_unused()
            watch = StoreWatch()
            for batch in range(self.batches):
                if batch == self.warmup:
                    watch.count_from_here()
                pointer, phases = shard.micro_batch(pointer, chance.integers(0, self.keys, self.rows), chance)
                phases_ms.append(phases)
                watch.look(shard.backend.statistics().local_bytes)
            _, manifest = shard.log.write_snapshot(shard.backend, pointer)
            pointer = shard.commit(shard.store, pointer, np.arange(1), chance)
            shard.lose_local_state()
            restore_ms = shard.restore_ms(pointer, self.keys)
            batch_ms = [round(phases["get"] + phases["commit"], 2) for phases in phases_ms]
            # Means of the counted micro-batches, as all of them are stored.
            once = {FULL_BYTES: manifest.stored_bytes, RESTORE_MS: restore_ms}
            storage = {what: number * len(self.counted) for what, number in once.items()}
            return watch.measured(phases_ms, batch_ms, {"backend": backend_name, **options}, **storage)


class _Shard:
    """A shard on a backend, and a storage."""

    def __init__(
        self, open_backend: Callable[[Path], Backend], log: Callable[[Path], ObjectCommitLog], home: Path, width: int
    ) -> None:
        self._open_backend, self._open_log, self._home, self._value_bytes = open_backend, log, home, width
        self._table = table_of(width)
        self.log = log(home)
        self.storage: ObjectStorage = self.log.storage
        self.executor: Executor = self.log.executor
        self.backend = open_backend(home)
        self.store = VersionedStore(self.backend, self.log)

    def commit(
        self, store: VersionedStore, pointer: Pointer | None, numbers: np.ndarray, chance: np.random.Generator
    ) -> Pointer:
        keys = keys_of(self._table, numbers)
        values = values_of(self._table, len(keys), self._value_bytes, chance)
        return _commit(store, pointer, keys, values)

    def fill(self, keys: int, chance: np.random.Generator, *, in_order: bool = False) -> Pointer:
        """Write all keys, and let the backend put them in order; nothing becomes durable.

        Parameters
        ----------
        in_order : bool
            They are written in the order of their hashes, which leaves the backend the least to do.
        """
        store, pointer = VersionedStore(self.backend), None
        numbers = np.arange(keys)
        if in_order:
            numbers = np.argsort(hashes_of(numbers))
        for first in range(0, keys, _FILL_ROWS):
            pointer = self.commit(store, pointer, numbers[first : first + _FILL_ROWS], chance)
            self.backend.maintain(pointer)
        assert pointer is not None
        return pointer

    def micro_batch(
        self, pointer: Pointer, drawn: np.ndarray, chance: np.random.Generator
    ) -> tuple[Pointer, dict[str, float]]:
        """Do to the store what one shard call does to the keys with these numbers; return what each part took."""
        keys = keys_of(self._table, np.unique(drawn))
        values = values_of(self._table, len(keys), self._value_bytes, chance)
        marks = [time.perf_counter()]
        with self.store.read_at(pointer) as view:
            view.get(TABLE, keys)
        marks.append(time.perf_counter())
        committed = _commit(self.store, pointer, keys, values)
        marks.append(time.perf_counter())
        self.backend.maintain(committed)
        marks.append(time.perf_counter())
        return committed, _parts(("get", "commit", "maintain"), marks)

    def lose_local_state(self) -> None:
        self.backend.close()
        shutil.rmtree(self._home)

    def restore_ms(self, pointer: Pointer, keys: int) -> float:
        """Return what it takes to restore a version in an empty directory, and to open it."""
        try:
            with self._open_backend(self._home) as backend:
                store = VersionedStore(backend, self._open_log(self._home))
                taken_ms = timed_ms(lambda: store.read_at(pointer).close())
                with store.read_at(pointer) as view:
                    found = sum(len(run) for run in view.scan(TABLE))
                if found != keys:
                    raise CorruptionError("the restored state is not the one that was stored", found=found, keys=keys)
                return taken_ms
        finally:
            shutil.rmtree(self._home)

    def download_ms(self, folder: Path) -> float:
        """Return what it takes to copy all objects of the storage to files."""

        def fetch(info: ObjectInfo) -> None:
            with (folder / info.key.replace("/", "-")).open("xb") as file:
                write_at(file.fileno(), self.storage.get(info.key, info.size_bytes), 0)

        folder.mkdir()
        try:
            return timed_ms(lambda: list(self.executor.map(fetch, self.storage.list(""))))
        finally:
            shutil.rmtree(folder)


@contextmanager
def _shard(
    job: Snapshots | Restore | Size,
    backend_name: str,
    options: Mapping[str, str],
    places: Places,
    url: str | None = None,
) -> Iterator[_Shard]:
    kind, tables = find_backend(backend_name), {TABLE: table_of(job.value_bytes)}
    home = (places.memory if kind.in_memory else places.disk) / "shard-0000"
    root = f"{url.rstrip('/')}/{places.disk.parent.name}" if url else str(places.disk / "durable")
    with ThreadPoolExecutor(_THREADS) as executor, open_storage(root) as storage:

        def open_backend(directory: Path) -> Backend:
            return kind(directory, tables, clock.new_id, dict(options))

        def open_log(directory: Path) -> ObjectCommitLog:
            return ObjectCommitLog(storage, _SHARD, tables, executor, directory, backend_name)

        shard = _Shard(open_backend, open_log, home, job.value_bytes)
        try:
            yield shard
        finally:
            shard.backend.close()
            storage.delete([found.key for found in storage.list("")])


@contextmanager
def serving(serves: bool) -> Iterator[None]:
    """Serve S3 for this process, which is for this run, unless the environment names a server."""
    if not serves or server_of_environment():
        yield
        return
    with ObjectStore() as store:
        os.environ |= store.environment
        yield


def _commit(store: VersionedStore, pointer: Pointer | None, keys: Keys, values: pa.RecordBatch) -> Pointer:
    with store.begin(pointer) as transaction:
        if pointer is not None:
            store.prune(pointer)
        transaction.put(TABLE, keys, values)
        committed = transaction.commit()
    assert committed is not None
    return committed


def timed_ms(work: Callable[[], object]) -> float:
    """Return what some work takes."""
    start = time.perf_counter()
    work()
    return round((time.perf_counter() - start) * 1000, 2)


def _parts(names: tuple[str, ...], marks: list[float]) -> dict[str, float]:
    return {name: round(float(s) * 1000, 2) for name, s in zip(names, np.diff(marks), strict=True)}
