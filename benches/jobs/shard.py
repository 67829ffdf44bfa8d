"""One shard in the store, without Spark: bytes of snapshots, time of restores, and costs by the size of the state."""

from __future__ import annotations

import os
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np
import pyarrow as pa

from holdfast import clock
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.block_io import write_at
from holdfast.backends.local_files import DURABLE
from holdfast.backends.registry import find_backend
from holdfast.backends.run_files.run_reader import KEPT
from holdfast.backends.schema import Keys
from holdfast.benches.instruments.measured import Measured, Places, StoreWatch
from holdfast.benches.instruments.object_store import object_store
from holdfast.benches.jobs.job import StoreJob, option, server_of_environment
from holdfast.benches.jobs.rows import TABLE, hashes_of, keys_of, table_of, values_of
from holdfast.errors import CorruptionError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage

FULL_BYTES, NEW_BYTES, RESTORE_MS = "bytes of a snapshot", "bytes sent for it", "restore, ms"
#: Keys of a small micro-batch, and of a cold look-up.
FEW_KEYS, COLD_KEYS = 1_000, 10_000
FEW, COLD_MS = f"get and commit {FEW_KEYS:,}", f"get {COLD_KEYS:,}, nothing in memory, ms"
#: Phases of a micro-batch of `Restore`.
RESTORE, PLAIN_DOWNLOAD = "restore", "plain download"
_THREADS = 8
_FILL_ROWS = 500_000
_SHARD = "bench/shard-0000"


@dataclass(frozen=True)
class ShardJob(StoreJob):
    """A job on one shard that fills the state first."""

    memory_mb: int | None = option(512, "memory of the rocksdb backend, MiB", click.IntRange(1))
    value_bytes: int = option(92, "bytes of a value")
    state_dir: str | None = option(None, "durable storage, as s3://bucket/bench; default: local disk")
    serves: bool = option(False, "start an S3 server with s3://bucket unless the environment names one", bool)

    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        with _serving(self.serves), _shard(self, backend_name, options, places) as shard:
            watch = StoreWatch({"backend": backend_name, **options}, self.warmup)
            once = self._run(shard, watch, places)
            # `once` has means, and documents have sums of the counted micro-batches.
            storage = {what: number * len(self.counted) for what, number in once.items()}
            return watch.measured(storage)

    @abstractmethod
    def _run(self, shard: Shard, watch: StoreWatch, places: Places) -> dict[str, float]:
        """Fill the shard, do the work, and return counts per micro-batch."""


@dataclass(frozen=True)
class Snapshots(ShardJob):
    """Writes a snapshot after each commit of a few changed keys; files of earlier snapshots are reused."""

    name = "snapshots"

    rows: int = option(20_000, "keys that change between two snapshots")
    keys: int = option(2_000_000, "keys in the state")
    batches: int = option(50, "snapshots")
    warmup: int = option(25, "uncounted snapshots at the start")

    def _run(self, shard: Shard, watch: StoreWatch, places: Places) -> dict[str, float]:
        pointer, sizes = shard.fill(self.keys), []
        for _ in range(self.batches):
            watch.begin()
            numbers = np.sort(shard.chance.choice(self.keys, self.rows, replace=False))
            with watch.part("commit"):
                pointer = shard.commit(shard.store, pointer, numbers)
            with watch.part("maintain"):
                shard.backend.maintain(pointer)
            with watch.part("snapshot", counts=True):
                _, manifest = shard.log.write_snapshot(shard.backend, pointer)
            sizes.append((manifest.stored_bytes, manifest.new_bytes))
            watch.look(shard.backend.statistics().local_bytes)
        full, new = np.mean(sizes[self.warmup :], axis=0).tolist()
        return {FULL_BYTES: full, NEW_BYTES: new}


@dataclass(frozen=True)
class Restore(ShardJob):
    """Restores state from the storage into an empty directory, alternating with a plain download."""

    name = "restore"

    rows: int = option(10_000_000, "keys in the state, all of which are restored: 1 GB")
    keys: int = option(10_000_000, "unused: always --rows")
    batches: int = option(5, "restores")
    warmup: int = option(1, "uncounted restores at the start")

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", self.rows)
        super().__post_init__()

    def _run(self, shard: Shard, watch: StoreWatch, places: Places) -> dict[str, float]:
        pointer = shard.commit(shard.store, shard.fill(self.keys), np.arange(1))
        _, manifest = shard.log.write_snapshot(shard.backend, pointer)
        local_bytes = shard.backend.statistics().local_bytes
        pointer = shard.commit(shard.store, pointer, np.arange(1))
        shard.lose_local_state()
        for _ in range(self.batches):
            watch.begin()
            watch.note(PLAIN_DOWNLOAD, shard.download_ms(places.disk / "plain"))
            watch.note(RESTORE, shard.restore_ms(pointer, self.keys), counts=True)
            watch.look(local_bytes)
        return {FULL_BYTES: manifest.stored_bytes}


@dataclass(frozen=True)
class Size(ShardJob):
    """Micro-batches on a state of some size, its snapshot and its restore.

    Merges run in the background and local files are not synced, as below a state server. Each micro-batch is followed
    by a small one that does not count.
    """

    name = "size"

    rows: int = option(100_000, "keys per micro-batch, drawn evenly from all")
    keys: int = option(1_000_000, "keys in the state")

    def _run(self, shard: Shard, watch: StoreWatch, places: Places) -> dict[str, float]:
        (shard.backend.directory / DURABLE).touch()
        pointer = shard.fill(self.keys, in_order=True)
        pa.default_memory_pool().release_unused()
        for _ in range(self.batches):
            watch.begin()
            numbers = shard.some_numbers(self.keys, self.rows)
            keys = keys_of(shard.table, numbers)
            with watch.part("get", counts=True):
                shard.look_up(pointer, keys)
            with watch.part("commit", counts=True):
                pointer = shard.commit(shard.store, pointer, numbers)
            with watch.part("maintain"):
                shard.backend.maintain(pointer)
            few = shard.some_numbers(self.keys, FEW_KEYS)
            few_keys = keys_of(shard.table, few)
            with watch.part(FEW):
                shard.look_up(pointer, few_keys)
                pointer = shard.commit(shard.store, pointer, few)
            watch.look(shard.backend.statistics().local_bytes)
        measured = {}
        if not shard.backend.in_memory:
            measured[COLD_MS] = shard.cold_ms(pointer, shard.some_numbers(self.keys, COLD_KEYS))
        _, manifest = shard.log.write_snapshot(shard.backend, pointer)
        pointer = shard.commit(shard.store, pointer, np.arange(1))
        shard.lose_local_state()
        return measured | {FULL_BYTES: manifest.stored_bytes, RESTORE_MS: shard.restore_ms(pointer, self.keys)}


class Shard:
    """A shard on a backend, with its storage."""

    def __init__(
        self,
        open_backend: Callable[[Path], Backend],
        open_log: Callable[[Path], ObjectCommitLog],
        home: Path,
        width: int,
    ) -> None:
        self._open_backend, self._open_log, self._home, self._value_bytes = open_backend, open_log, home, width
        self.chance = np.random.default_rng(0)
        self.table = table_of(width)
        self.log = open_log(home)
        self.storage: ObjectStorage = self.log.storage
        self.backend = open_backend(home)
        self.store = VersionedStore(self.backend, self.log)

    def commit(self, store: VersionedStore, pointer: Pointer | None, numbers: np.ndarray) -> Pointer:
        """Write the keys with these numbers, as a shard call does."""
        keys = keys_of(self.table, numbers)
        values = values_of(self.table, len(keys), self._value_bytes, self.chance)
        with store.begin(pointer) as transaction:
            if pointer is not None:
                store.prune(pointer)
            transaction.put(TABLE, keys, values)
            committed = transaction.commit()
        assert committed is not None
        return committed

    def some_numbers(self, keys: int, most: int) -> np.ndarray:
        """Draw the numbers of about `most` keys, all equally likely."""
        return np.unique(self.chance.integers(0, keys, most))

    def look_up(self, pointer: Pointer, keys: Keys) -> None:
        with self.store.read_at(pointer) as view:
            view.get(TABLE, keys)

    def cold_ms(self, pointer: Pointer, numbers: np.ndarray) -> float:
        """Time a look-up in a fresh process, after evicting all files from memory."""
        KEPT.forget()
        for path in self._home.rglob("*"):
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            return fresh.submit(_look_up_ms, self._open_backend, self._home, pointer, numbers).result()

    def fill(self, keys: int, *, in_order: bool = False) -> Pointer:
        """Write all keys and let the backend merge them; nothing becomes durable."""
        store, pointer = VersionedStore(self.backend), None
        numbers = np.arange(keys)
        if in_order:
            numbers = np.argsort(hashes_of(numbers))
        for first in range(0, keys, _FILL_ROWS):
            pointer = self.commit(store, pointer, numbers[first : first + _FILL_ROWS])
            self.backend.maintain(pointer)
        assert pointer is not None
        return pointer

    def lose_local_state(self) -> None:
        self.backend.close()
        shutil.rmtree(self._home)

    def restore_ms(self, pointer: Pointer, keys: int) -> float:
        """Time restoring a version in an empty directory and opening it."""
        try:
            with self._open_backend(self._home) as backend:
                store = VersionedStore(backend, self._open_log(self._home))
                taken_ms = timed_ms(lambda: store.read_at(pointer).close())
                with store.read_at(pointer) as view:
                    found = sum(len(run) for run in view.scan(TABLE))
                if found != keys:
                    raise CorruptionError("the restored state differs from the stored state", found=found, keys=keys)
                return taken_ms
        finally:
            shutil.rmtree(self._home)

    def download_ms(self, folder: Path) -> float:
        """Time copying all objects of the storage to files, with as many threads as a restore."""

        def fetch(info: ObjectInfo) -> None:
            with (folder / info.key.replace("/", "-")).open("xb") as file:
                write_at(file.fileno(), self.storage.get(info.key, info.size_bytes), 0)

        folder.mkdir()
        try:
            return timed_ms(lambda: list(self.log.executor.map(fetch, self.storage.list(""))))
        finally:
            shutil.rmtree(folder)


@contextmanager
def _shard(job: ShardJob, backend_name: str, options: Mapping[str, str], places: Places) -> Iterator[Shard]:
    kind, tables = find_backend(backend_name), {TABLE: table_of(job.value_bytes)}
    home = (places.memory if kind.in_memory else places.disk) / "shard-0000"
    url = job.state_dir and f"{job.state_dir.rstrip('/')}/{places.disk.parent.name}"
    with ThreadPoolExecutor(_THREADS) as executor, open_storage(url or str(places.disk / "durable")) as storage:
        open_backend = partial(kind, tables=tables, new_id=clock.new_id, options=dict(options))

        def open_log(directory: Path) -> ObjectCommitLog:
            return ObjectCommitLog(storage, _SHARD, tables, executor, directory, backend_name)

        shard = Shard(open_backend, open_log, home, job.value_bytes)
        try:
            yield shard
        finally:
            shard.backend.close()
            storage.delete([found.key for found in storage.list("")])


@contextmanager
def _serving(serves: bool) -> Iterator[None]:
    """Serve S3 for this process unless the environment names a server."""
    if not serves or server_of_environment():
        yield
        return
    with object_store() as environment:
        os.environ |= environment
        yield


def _look_up_ms(open_backend: Callable[[Path], Backend], home: Path, pointer: Pointer, numbers: np.ndarray) -> float:
    with open_backend(home) as backend:
        keys = keys_of(backend.tables[TABLE], numbers)

        def look_up() -> None:
            with backend.view(pointer) as view:
                view.get(TABLE, keys)

        return timed_ms(look_up)


def timed_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return round((time.perf_counter() - start) * 1000, 2)
