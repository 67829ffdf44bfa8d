"""A checkpoint directory on a local disk, with the history of one shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.model.shard_history import ShardHistory
from tests.unit.holdfast.commands.checkpoint import put_record


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "durable"


@pytest.fixture
def storage(root: Path) -> Iterator[ObjectStorage]:
    with open_storage(str(root)) as opened:
        yield opened


@pytest.fixture
def shard(storage: ObjectStorage) -> ShardHistory:
    """Return a shard of 30 versions with a snapshot after each 10."""
    put_record(storage)
    history = ShardHistory(storage)
    history.grow(None, 30, snapshot_every=10)
    return history
