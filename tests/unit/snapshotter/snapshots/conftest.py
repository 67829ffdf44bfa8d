"""A storage, and a shard of it on as many executors as a test opens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from tests.storage_in_ram import storage_in_ram
from tests.unit.snapshotter.snapshots.shard import Opener, Shard


@pytest.fixture
def storage() -> Iterator[ObjectStorage]:
    with storage_in_ram() as opened:
        yield opened


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
