"""A state directory on a local disk, with the history of one shard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import Buffer

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from tests.model.shard_history import ShardHistory
from tests.unit.holdfast.commands.state_dir import put_record


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "durable"


class OneByOne(WrappedStorage):
    """A local disk on which each object is younger than the one before.

    File systems that are in memory store several within one tick of the clock, and what was stored last then counts
    for all of them.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(open_storage(str(root)))
        self._root = root
        self._last_ns = 0

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        path = self._root / key
        self._last_ns = max(path.stat().st_mtime_ns, self._last_ns + 1_000_000)
        os.utime(path, ns=(self._last_ns, self._last_ns))


@pytest.fixture
def storage(root: Path) -> Iterator[ObjectStorage]:
    with OneByOne(root) as opened:
        yield opened


@pytest.fixture
def shard(storage: ObjectStorage) -> ShardHistory:
    """Return a shard of 30 versions with a snapshot after each 10."""
    put_record(storage)
    history = ShardHistory(storage)
    history.grow(None, 30, snapshot_every=10)
    return history
