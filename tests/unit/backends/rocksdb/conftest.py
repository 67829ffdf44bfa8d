"""Shards for tests of the `rocksdb` backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.backends.rocksdb import reads as rocksdb_reads
from holdfast.backends.rocksdb import view as rocksdb_view
from holdfast.backends.rocksdb import writes as rocksdb_writes
from holdfast.backends.rocksdb.backend import RocksDBBackend
from tests.unit.backends.rocksdb.shards import (
    open_shard,
)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[RocksDBBackend]:
    with open_shard(tmp_path / "shard") as backend:
        yield backend


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are many: every version is several batches, every read several chunks, every change a file."""
    monkeypatch.setattr(rocksdb_writes, "BATCH_BYTES", 200)
    monkeypatch.setattr(rocksdb_writes, "CHUNK_KEYS", 7)
    monkeypatch.setattr(rocksdb_view, "CHUNK_KEYS", 5)
    monkeypatch.setattr(rocksdb_reads, "RUN_ROWS", 11)
    monkeypatch.setattr(rocksdb_writes, "LOG_BYTES", 0)
