"""Reading a key of a large version costs by what was asked for, also from a real HDFS."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Keys
from holdfast.clock import new_id
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.storage.local import LocalStorage
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.version_reader import At, VersionReader
from tests.servers.hdfs import Hdfs
from tests.unit.snapshotter.test_version_reader import COUNTS, PREFIX, TABLES, work_folder


@pytest.mark.all
@pytest.mark.slow(7)
@pytest.mark.parametrize("backend", ["filesystem", "rocksdb"])
def test_a_key_in_a_large_snapshot_reads_a_small_part_of_it(backend: str, tmp_path: Path) -> None:
    """What is read follows the number of keys, not the size of the version."""
    with LocalStorage(str(tmp_path / "durable")) as storage:
        share = share_read(storage, backend, tmp_path)
        assert share < (0.6 if backend == "filesystem" else 0.1), share  # a part has 8 MiB of these 75


@pytest.mark.all
@pytest.mark.hdfs
@pytest.mark.slow(15)
def test_a_key_on_hdfs_reads_a_small_part_of_it(hdfs: Hdfs, tmp_path: Path) -> None:
    """A range of a file comes without the rest of it: told by the DataNode, not by the client."""
    with open_storage(f"{hdfs.url}/look-up", hdfs.options()) as storage:
        before = hdfs.bytes_read()
        share = share_read(storage, "rocksdb", tmp_path)
        read = hdfs.bytes_read() - before
        stored = sum(info.size_bytes for info in storage.list(""))
    assert share < 0.1, share
    assert 0 < read < 0.1 * stored, (read, stored)


def share_read(storage: ObjectStorage, backend: str, tmp_path: Path) -> float:
    """Store a version of 400,000 rows, look one up, and return which share of the version's bytes that took."""
    rows = 400_000
    with (
        ThreadPoolExecutor(4) as executor,
        find_backend(backend)(tmp_path / "local", TABLES, new_id) as held,
    ):
        log = ObjectCommitLog(storage, PREFIX, TABLES, executor, tmp_path / "local", backend)
        store = VersionedStore(held, log)
        chance = np.random.default_rng(3)
        hashes = np.sort(chance.integers(0, 2**64, rows, np.uint64))
        columns = pa.table({"user": [f"{n}" for n in range(rows)]})
        random = [chance.bytes(75).hex() for _ in range(rows)]
        with store.begin(None) as transaction:
            transaction.put("counts", Keys.of(COUNTS, hashes, columns), pa.table({"n": np.arange(rows), "s": random}))
            pointer = transaction.commit()
        assert pointer is not None
        entry, _ = log.write_snapshot(held, pointer)
        newest = At(log_one(store, pointer))
        wanted = Keys.of(COUNTS, hashes[123_456:123_457], columns.slice(123_456, 1))
        reader = VersionReader(storage, PREFIX, TABLES, executor, work_folder)
        before = storage.requests["get_bytes"]
        (row,) = reader.find(newest, "counts", wanted).values.to_pylist()
        assert row == {"n": 123_456, "s": random[123_456]}
        reader.close()
        return (storage.requests["get_bytes"] - before) / entry.content_bytes


def log_one(store: VersionedStore, pointer: Pointer) -> Pointer:
    """Return a version on a snapshot: one more commit, of another key."""
    with store.begin(pointer) as transaction:
        other = Keys.of(COUNTS, np.array([5], np.uint64), pa.table({"user": ["other"]}))
        transaction.put("counts", other, pa.table({"n": [1], "s": ["?"]}))
        made = transaction.commit()
    assert made is not None
    return made
