"""A storage, and a shard of it on as many executors as a test opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@pytest.fixture
def shard_of(storage: ObjectStorage, tmp_path: Path) -> Iterator[Opener]:
    """Open the shard on one more executor, which has nothing locally."""
    opened: list[Shard] = []
    with ThreadPoolExecutor(4) as executor:

        def open_shard(backend_name: str = "memory", carried_bytes: int = 0) -> Shard:
            shard = Shard(storage, executor, tmp_path / f"executor-{len(opened)}", backend_name, carried_bytes)
            opened.append(shard)
            return shard

        yield open_shard
        for shard in opened:
            shard.backend.close()


SHARD = "totals/shard-0003"


TABLES = {"counts": COUNTS}


Opener = Callable[..., "Shard"]


class Shard:
    """A shard on one executor."""

    def __init__(
        self, storage: ObjectStorage, executor: Executor, directory: Path, backend_name: str, carried_bytes: int
    ) -> None:
        self.storage = storage
        self.backend = open_backend(backend_name, directory, TABLES)
        self.log = ObjectCommitLog(storage, SHARD, TABLES, executor, directory, backend_name, carried_bytes)
        self.store = VersionedStore(self.backend, self.log)

    def write(self, base: Pointer | None, users: range, n: int) -> Pointer:
        with self.store.begin(base) as transaction:
            keys = keys_of(COUNTS, [(f"user {i}",) for i in users])
            transaction.put("counts", keys, values_of(COUNTS, [(n,)] * len(users)))
            pointer = transaction.commit()
        assert pointer is not None
        return pointer

    def state(self, pointer: Pointer) -> dict[str, int]:
        with self.store.read_at(pointer) as view:
            return {str(key[0]).removeprefix("user "): int(value[0]) for key, value in contents(view, "counts").items()}

    def lineage(self, pointer: Pointer) -> Lineage:
        with self.store.read_at(pointer) as view:
            return Lineage.of(view.properties)

    def snapshot(self, pointer: Pointer) -> tuple[ChainEntry, Manifest]:
        return self.log.write_snapshot(self.backend, pointer)


def states(*written: tuple[range, int]) -> dict[str, int]:
    return {str(i): n for users, n in written for i in users}
