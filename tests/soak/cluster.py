"""A cluster in small, at speed: executors with all that a state server does, queries, and a clock that the test turns.

The backend, the store, the commit log, snapshots, housekeeping and retention are real, with their threads, on local
files. Spark, processes and sockets are absent: a call does what a worker does, and announces its commit directly.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from sys import getsizeof
from typing import Any

from holdfast.backends.base import Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.client.messages import Committed, ShardAddress
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.executor.takeover import open_backend
from holdfast.spark_integration.server.housekeeping import Housekeeping, ShardUse
from holdfast.spark_integration.server.open_shards import DurableLogs, OpenShards
from holdfast.spark_integration.server.snapshotting import Snapshotting
from holdfast.testing.state_rows import COUNTS, contents, keys_of, values_of

TABLES = {"counts": COUNTS}
TIDY_EVERY_MS = 300_000
DRAIN_SECONDS = 120.0


class Clock:
    """Simulated time."""

    def __init__(self) -> None:
        self.ms = 1_800_000_000_000

    def __call__(self) -> int:
        return self.ms


class ClockedStorage(ObjectStorage):
    """A storage whose objects are as old as the clock says; all that were opened at one place count together."""

    def __init__(self, storage: ObjectStorage, place: Place) -> None:
        super().__init__(storage.url)
        self._storage = storage
        self._place = place
        place.opened += 1

    def put(self, key: str, data: Any) -> None:
        # First of all its time: another thread may list the object as soon as it is there.
        self._place.stored_ms[key] = self._place.clock()
        self._storage.put(key, data)
        self._place.count("put")

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        self._place.count("get")
        return self._storage.get(key, limit_bytes)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        self._place.count("list")
        # An object without a time was listed and then deleted by another thread: it is not old.
        stored_ms, now_ms = self._place.stored_ms, self._place.clock()
        return [ObjectInfo(i.key, i.size_bytes, stored_ms.get(i.key, now_ms)) for i in self._storage.list(prefix)]

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._place.count("delete")
        self._storage.delete(keys)
        for key in keys:
            self._place.stored_ms.pop(key, None)

    def close(self) -> None:
        self._place.opened -= 1
        self._storage.close()


class Place:
    """A state directory: when its objects were stored, and what was asked of it."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.clock = clock
        self.stored_ms: dict[str, int] = {}
        self.requests: Counter[str] = Counter()
        self.opened = 0
        self._lock = threading.Lock()

    def count(self, action: str) -> None:
        with self._lock:
            self.requests[action] += 1

    def open(self, url: str, options: dict[str, str]) -> ClockedStorage:
        assert url == str(self.path)
        return ClockedStorage(open_storage(url), self)


class Executor:
    """An executor: its local state and its server's components, each with its thread."""

    def __init__(self, directory: Path, place: Place, clock: Clock) -> None:
        self.directory = local_dirs.private_directory(directory)
        self.shards = OpenShards(self.directory)
        self.threads = ThreadPoolExecutor(2)
        self.logs = DurableLogs(partial(ThreadPoolExecutor, 2), place.open, clock)
        self.snapshotting = Snapshotting(self.shards, self.logs, clock, clock)
        self.use = ShardUse(clock)
        self.housekeeping = Housekeeping(self.shards, self.logs, self.use, self.snapshotting.forget, clock)
        self._workers = [threading.Thread(target=work.run) for work in (self.housekeeping, self.snapshotting)]
        for worker in self._workers:
            worker.start()

    def announce(self, message: Committed) -> None:
        self.housekeeping.announce(message)
        self.snapshotting.announce(message)

    def drain(self) -> None:
        for queue in (self.housekeeping.queue, self.snapshotting.queue):
            assert queue.drain(DRAIN_SECONDS)

    def failures(self) -> dict[str, int]:
        counted = self.housekeeping.counters | self.snapshotting.counters
        return {name: count for name, count in counted.items() if "error" in name and count}

    def end(self) -> None:
        """End, and leave nothing here."""
        for queue in (self.housekeeping.queue, self.snapshotting.queue):
            queue.end()
        for worker in self._workers:
            worker.join()
        self.shards.close(1.0)
        self.logs.close_unused([])
        self.threads.shutdown()
        shutil.rmtree(self.directory)


@dataclass
class Query:
    """A query with one operator: what Spark remembers of its shards, and what their state must be."""

    name: str
    shards: int
    place: Place
    policy: SnapshotPolicy
    retained_versions: int
    carried_bytes: int
    backend: str
    keys: int = 60
    batch_id: int = 0
    token: str = ""
    rows: dict[int, tuple[Pointer, dict[Pointer, bytes]]] = field(default_factory=dict)
    state: dict[int, dict[str, int]] = field(default_factory=dict)
    storage: ClockedStorage | None = None

    def call(self, shard: int, executor: Executor, rng: random.Random, threads: ThreadPoolExecutor) -> None:
        """Run a shard's call of the current micro-batch on an executor."""
        self.storage = self.storage or self.place.open(str(self.place.path), {})
        remembered = self.rows.get(shard)
        shards = local_dirs.shards_directory(executor.directory, in_memory=find_backend(self.backend).in_memory)
        operator = shards / f"query-{self.name}" / "totals"
        note = local_dirs.private_directory(operator / local_dirs.RUNS) / f"run-{self.batch_id // 500}"
        note.touch()
        directory = operator / local_dirs.shard_name(shard, self.shards, self.backend, str(self.place.path))
        address = ShardAddress.of(directory, self.backend, {}, TABLES)
        backend = open_backend(self.backend, directory, TABLES, {}, executor.directory)
        prefix = f"{self.name}/shard-{shard:04d}"
        carried = {} if remembered is None else dict(remembered[1])
        log = ObjectCommitLog(
            *(self.storage, prefix, TABLES, threads, directory, self.backend, self.carried_bytes, carried),
            now_ms=self.place.clock,
        )
        store = VersionedStore(backend, log)
        accepted = None if remembered is None else remembered[0]
        # All at first: a state that is still filling would look like growth.
        drawn = range(self.keys) if accepted is None else rng.sample(range(self.keys), 3)
        written = {f"u{key}": self.batch_id for key in drawn}
        with store.begin(accepted, self.batch_id + 1) as transaction:
            if accepted is not None:
                store.prune(accepted)
            rows = [(value,) for value in written.values()]
            transaction.put("counts", keys_of(COUNTS, [(key,) for key in written]), values_of(COUNTS, rows))
            committed = transaction.commit()
        assert committed is not None
        kept = {committed: log.carried[committed]} if committed in log.carried else {}
        self.rows[shard] = committed, kept
        self.state.setdefault(shard, {}).update(written)
        executor.announce(
            Committed(
                shard=address,
                accepted=accepted,
                committed=committed,
                prefix=prefix,
                state_dir=str(self.place.path),
                storage_options={"token": self.token},
                policy=self.policy,
                retained_versions=self.retained_versions,
            )
        )

    def check(self, directory: Path, threads: ThreadPoolExecutor) -> None:
        """Restore every shard from what is durable, and compare."""
        for shard, (pointer, carried) in self.rows.items():
            assert self.storage is not None
            home = local_dirs.private_directory(directory / f"check-{self.name}-{shard}")
            log = ObjectCommitLog(
                *(self.storage, f"{self.name}/shard-{shard:04d}", TABLES, threads, home, self.backend, 0, dict(carried))
            )
            store = VersionedStore(open_backend(self.backend, home, TABLES, {}, directory), log)
            with store.read_at(pointer) as view:
                found = {key[0]: value[0] for key, value in contents(view, "counts").items()}
            assert found == self.state[shard], (self.name, shard)
            shutil.rmtree(home)

    def end(self) -> None:
        if self.storage is not None:
            self.storage.close()
            self.storage = None


@dataclass(frozen=True)
class Sample:
    """What a cluster occupies at a moment."""

    #: Of all executors; a file with several links counts once.
    local_bytes: int
    local_files: int
    #: Open files of this process.
    descriptors: int
    #: What the servers' components hold in memory: queues, dictionaries, headers.
    server_bytes: int
    #: Of this process.
    resident_bytes: int
    #: In durable storage.
    objects: int
    #: So far; calls of shards.
    requests: int
    calls: int
    #: Open ones.
    storages: int
    #: Local directories of one query's shards, wherever they are.
    copies: int

    @classmethod
    def of(cls, executors: Iterable[Executor], place: Place, query: Query, calls: int) -> Sample:
        sizes: dict[int, int] = {}
        executors = list(executors)
        for executor in executors:
            for parent, _, names in os.walk(executor.directory):
                for name in names:
                    found = os.lstat(os.path.join(parent, name))
                    sizes[found.st_ino] = found.st_size
        gc.collect()
        held = [(e.housekeeping, e.snapshotting, e.logs, e.use, e.shards) for e in executors]
        return cls(
            local_bytes=sum(sizes.values()),
            local_files=len(sizes),
            descriptors=len(os.listdir("/proc/self/fd")),
            server_bytes=held_bytes(held),
            resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            objects=len(place.stored_ms),
            requests=place.requests.total(),
            calls=calls,
            storages=place.opened,
            copies=sum(len(list(e.directory.glob(f"*/query-{query.name}/*/shard-*"))) for e in executors),
        )


_CONTAINERS = (dict, list, tuple, set, frozenset)


def held_bytes(root: object) -> int:
    """Return the bytes of all objects of holdfast and plain Python that can be reached from one."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    total = 0
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, (type, threading.Thread, ThreadPoolExecutor, Place, Clock)):
            continue
        seen.add(id(found))
        total += getsizeof(found)
        if isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, _CONTAINERS):
            waiting += found
        elif is_dataclass(found) or type(found).__module__.startswith(("holdfast.", "collections")):
            waiting += vars(found).values() if hasattr(found, "__dict__") else ()
    return total
