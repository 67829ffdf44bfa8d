"""An empty storage, threads, as those who read many objects of a shard are given them, and a shard on an executor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.backends.base import Pointer
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.snapshots import Manifest
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.testing.state_rows import COUNTS, contents, keys_of, values_of
from tests.model.built_in import open_backend
from tests.ram import storage_in_ram


@pytest.fixture
def storage() -> Iterator[ObjectStorage]:
    with storage_in_ram() as opened:
        yield opened


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


PREFIX = "totals/shard-0003"


TABLES = {"counts": COUNTS}


class Shard:
    """A shard on one executor: its backend, log and store."""

    def __init__(
        self,
        storage: ObjectStorage,
        executor: Executor,
        directory: Path,
        backend_name: str = "memory",
        carried_bytes: int = 0,
    ) -> None:
        self.backend = open_backend(backend_name, directory, TABLES)
        self.log = ObjectCommitLog(storage, PREFIX, TABLES, executor, directory, backend_name, carried_bytes)
        self.store = VersionedStore(self.backend, self.log)

    def commit(self, base: Pointer | None, *rows: tuple[str, int | None], delete: Sequence[str] = ()) -> Pointer:
        with self.store.begin(base) as transaction:
            if rows:
                transaction.put(
                    "counts", keys_of(COUNTS, [(u,) for u, _ in rows]), values_of(COUNTS, [(n,) for _, n in rows])
                )
            if delete:
                transaction.delete("counts", keys_of(COUNTS, [(u,) for u in delete]))
            pointer = transaction.commit()
        assert pointer is not None
        return pointer

    def grow(self, base: Pointer | None, commits: int) -> Pointer:
        """Commit so many times, each time one user; user i gets value i."""
        first = base.version if base else 0
        for i in range(first, first + commits):
            base = self.commit(base, (f"u{i}", i))
        assert base is not None
        return base

    def state(self, pointer: Pointer) -> dict[object, object]:
        with self.store.read_at(pointer) as view:
            return {key[0]: value[0] for key, value in contents(view, "counts").items()}

    def snapshot(self, pointer: Pointer) -> tuple[ChainEntry, Manifest]:
        return self.log.write_snapshot(self.backend, pointer)

    def lineage(self, pointer: Pointer) -> Lineage:
        with self.store.read_at(pointer) as view:
            return Lineage.of(view.properties)

    def chain(self, pointer: Pointer) -> list[str]:
        return [entry.key for entry in self.lineage(pointer).chain]
