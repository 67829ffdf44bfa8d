"""A storage, and one shard of it on two executors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import xxhash

from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.clock import new_id
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.state_rows import COUNTS, contents, keys_of, values_of
from tests.ram import storage_in_ram


@pytest.fixture(params=["file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStorage]:
    made: AbstractContextManager[ObjectStorage] = (
        storage_in_ram() if request.param == "memory" else open_storage(f"file://{tmp_path}/durable")
    )
    with made as opened:
        yield opened


@pytest.fixture
def shard(storage: ObjectStorage, executor: Executor, tmp_path: Path) -> Shard:
    return Shard(storage, executor, tmp_path / "here")


@pytest.fixture
def elsewhere(storage: ObjectStorage, executor: Executor, tmp_path: Path) -> Shard:
    """Return the same shard on another executor, which has nothing locally."""
    return Shard(storage, executor, tmp_path / "elsewhere")


PREFIX = "totals/shard-0003"


TABLES = {"counts": COUNTS}


class Shard:
    """A shard on one executor: its backend, log and store; every commit writes one user."""

    def __init__(self, storage: ObjectStorage, executor: Executor, directory: Path, carried_bytes: int = 0) -> None:
        self.backend = MemoryBackend(directory, TABLES, new_id)
        self.log = ObjectCommitLog(storage, PREFIX, TABLES, executor, directory, "memory", carried_bytes)
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
        """Commit so many times; user i gets value i."""
        first = base.version if base else 0
        for i in range(first, first + commits):
            base = self.commit(base, (f"u{i}", i))
        assert base is not None
        return base

    def state(self, pointer: Pointer) -> dict[object, object]:
        with self.store.read_at(pointer) as view:
            return {key[0]: value[0] for key, value in contents(view, "counts").items()}

    def snapshot(self, pointer: Pointer) -> ChainEntry:
        return self.log.write_snapshot(self.backend, pointer)[0]

    def chain(self, pointer: Pointer) -> list[str]:
        with self.store.read_at(pointer) as view:
            return [entry.key for entry in Lineage.of(view.properties).chain]


def with_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a stored file with another header, and a right digest."""
    size = struct.unpack("<I", data[-32:-28])[0]
    footer = json.loads(data[-32 - size : -32])
    change(footer["header"])
    text = json.dumps(footer).encode()
    body = data[: -32 - size] + text + struct.pack("<IHH", len(text), 0, 1)
    return body + xxhash.xxh3_128(body).digest() + b"HOLDFAST"


def lineage_of(shard: Shard, pointer: Pointer) -> Lineage:
    with shard.store.read_at(pointer) as view:
        return Lineage.of(view.properties)
