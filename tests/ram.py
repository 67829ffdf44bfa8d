"""Places in RAM where there is room: tests sync files thousands of times."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem

from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage

_RAM = Path("/dev/shm")
_ROOM_BYTES = 4 << 30


def place_in_ram() -> Path | None:
    """Return the file system in RAM, if there is one with room; containers often give it 64 MB."""
    has_room = _RAM.is_dir() and os.access(_RAM, os.W_OK) and shutil.disk_usage(_RAM).free > _ROOM_BYTES
    return _RAM if has_room else None


_numbers = itertools.count()


@contextmanager
def storage_in_ram() -> Iterator[ObjectStorage]:
    """Give an empty storage, of which nothing stays: each list of fsspec reads all that its process keeps in RAM."""
    root = f"/in-ram-{next(_numbers)}"
    with open_storage(f"memory:/{root}") as storage:
        yield storage
    for path in [path for path in MemoryFileSystem.store if path.startswith(f"{root}/")]:
        del MemoryFileSystem.store[path]
