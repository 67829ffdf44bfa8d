"""A storage, and one shard of it on two executors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.ram import storage_in_ram
from tests.unit.snapshotter.conftest import Shard


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
