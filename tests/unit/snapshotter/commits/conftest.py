"""A storage, and one shard of it on two executors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

import pytest

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from tests.unit.snapshotter.commits.shard import Shard

_numbers = itertools.count()


@pytest.fixture(params=["file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStorage]:
    url = f"file://{tmp_path}/durable" if request.param == "file" else f"memory://commits-{next(_numbers)}"
    with open_storage(url) as opened:
        yield opened


@pytest.fixture
def shard(storage: ObjectStorage, executor: Executor, tmp_path: Path) -> Shard:
    return Shard(storage, executor, tmp_path / "here")


@pytest.fixture
def elsewhere(storage: ObjectStorage, executor: Executor, tmp_path: Path) -> Shard:
    """Return the same shard on another executor, which has nothing locally."""
    return Shard(storage, executor, tmp_path / "elsewhere")
