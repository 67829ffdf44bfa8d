"""Durable storage in RAM, for tests that need thousands of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from fsspec.implementations.memory import MemoryFileSystem

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage

_numbers = itertools.count()


@contextmanager
def storage_in_ram() -> Iterator[ObjectStorage]:
    """Give an empty storage, of which nothing stays: each list of fsspec reads all that its process keeps in RAM."""
    root = f"/in-ram-{next(_numbers)}"
    with open_storage(f"memory:/{root}") as storage:
        yield storage
    for path in [path for path in MemoryFileSystem.store if path.startswith(f"{root}/")]:
        del MemoryFileSystem.store[path]
