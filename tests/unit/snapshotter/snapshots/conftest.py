"""A storage, and a shard of it on as many executors as a test opens; each row is of a user with a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path

import pytest

from holdfast.backends.base import Pointer
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from tests.unit.snapshotter.conftest import Shard


@pytest.fixture
def shard_of(storage: ObjectStorage, executor: Executor, tmp_path: Path) -> Iterator[Opener]:
    """Open the shard on one more executor, which has nothing locally."""
    opened: list[NumberedUsers] = []

    def open_shard(backend_name: str = "memory", carried_bytes: int = 0) -> NumberedUsers:
        place = tmp_path / f"executor-{len(opened)}"
        opened.append(NumberedUsers(storage, executor, place, backend_name, carried_bytes))
        return opened[-1]

    yield open_shard
    for shard in opened:
        shard.backend.close()


Opener = Callable[..., "NumberedUsers"]


class NumberedUsers(Shard):
    def write(self, base: Pointer | None, users: range, n: int) -> Pointer:
        return self.commit(base, *states((users, n)).items())


def states(*written: tuple[range, int]) -> dict[str, int]:
    return {f"user {i}": n for users, n in written for i in users}
