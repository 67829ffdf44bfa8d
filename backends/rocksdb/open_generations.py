"""Generations that this process has open, and its part of the executor's block cache.

A worker serves many shards, each for one call in every micro-batch, and opening a database takes milliseconds: so what
it has opened stays open for the next one.

Invariants
----------
* **the same folder**: a generation is found by the inode of its folder, which is locked by whoever reads it.
* **bounded**: `MOST_OPEN` databases, the most recently used ones, and one block cache. What all processes of an
  executor may have in caches is shared out evenly: each has a folder below ``rocksdb-readers``, locked as long as the
  process lives, so each knows how many they are.
* **let go**: a generation that was taken away is closed by the next call; a forked process begins with none.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rocksdict import Cache, Rdict

from holdfast.backends.local.folder_locks import try_lock_alone
from holdfast.backends.local_files import list_folder, lock_folder, reading
from holdfast.backends.rocksdb.errors import rocksdb_errors
from holdfast.backends.rocksdb.generation import require_whole
from holdfast.backends.rocksdb.generation_file import GenerationFile
from holdfast.backends.rocksdb.options import open_rocksdb, reader_options

READERS = "rocksdb-readers"
#: RocksDB's own objects take half a MiB for each.
MOST_OPEN = 64
_CACHE_BYTES_MIN = 4 << 20


class OpenGeneration(NamedTuple):
    """A generation that is open for reading."""

    folder: Path
    database: Rdict
    file: GenerationFile


class CacheShare:
    """What this process may have of an executor's block caches.

    `folder` is where the executor's processes are counted, `name` this process there.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        self._lock = lock_folder(self.folder)
        self._seen: list[str] = []
        self.cache = Cache(_CACHE_BYTES_MIN)
        self._size_bytes = _CACHE_BYTES_MIN

    def share_out(self, budget_bytes: int) -> None:
        """Take an even part of a budget; costs one listing where the processes are the same."""
        names = list_folder(self.folder.parent)
        if names != self._seen:
            self._seen = [name for name in names if name == self.folder.name or self._is_alive(name)]
        size_bytes = max(_CACHE_BYTES_MIN, budget_bytes // max(1, len(self._seen)))
        if size_bytes != self._size_bytes:
            self.cache.set_capacity(size_bytes)
            self._size_bytes = size_bytes

    def _is_alive(self, name: str) -> bool:
        path = self.folder.parent / name
        with try_lock_alone(path) as is_left:
            if is_left:
                with suppress(OSError):
                    path.rmdir()
        return not is_left

    def is_counted(self) -> bool:
        """Whether the others can see it; somebody may have cleaned the directory."""
        return self.folder.is_dir()

    def close(self) -> None:
        """Be counted no longer."""
        self._lock.close()


class OpenGenerations:
    """See the module. Safe for many threads."""

    def __init__(self) -> None:
        # What a forked process inherits must not be closed there: RocksDB's threads are the parent's.
        self._inherited: list[object] = []
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, int], OpenGeneration] = OrderedDict()
        self._shares: dict[Path, CacheShare] = {}

    def forget(self) -> None:
        """Begin anew in a forked process."""
        self._inherited += [self._open, self._shares]
        self._begin()

    def open(
        self, folder: Path, executor_directory: Path, cache_bytes: int, new_id: Callable[[], str]
    ) -> OpenGeneration:
        """Return the generation in a folder, opened if it is not; the caller has locked the folder.

        Raises as `GenerationFile.read` and `rocksdb_errors`.
        """
        with reading(folder):
            found = os.stat(folder)
        place = found.st_dev, found.st_ino
        with self._lock:
            share = self._shared(executor_directory / READERS, cache_bytes, new_id)
            known = self._open.get(place)
            if known is not None and known.folder == folder:
                self._open.move_to_end(place)
                return known
        file = GenerationFile.read(folder)
        require_whole(folder, file.lists)  # RocksDB takes one that was cut for an older one
        with rocksdb_errors(folder):
            database = open_rocksdb(folder, reader_options(share.cache), read_only=True)
        opened = OpenGeneration(folder, database, file)
        with self._lock:
            self._open[place] = opened
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return opened

    def _shared(self, readers: Path, cache_bytes: int, new_id: Callable[[], str]) -> CacheShare:
        """Return this process's part of the cache of an executor."""
        share = self._shares.get(readers)
        if share is None or not share.is_counted():
            for gone in [path for path, other in self._shares.items() if not other.is_counted()]:
                self._shares.pop(gone).close()
            share = self._shares[readers] = CacheShare(readers, new_id())
        share.share_out(cache_bytes)
        return share

    def let_go(self) -> None:
        """Close what was taken away; whoever still reads it keeps it."""
        with self._lock:
            gone = [place for place, opened in self._open.items() if not _is_at(place, opened.folder)]
            unused = [self._open.pop(place) for place in gone]
        del unused  # here: closing a database takes a while

    def close(self, folder: Path) -> None:
        """Close a generation that is damaged."""
        with self._lock:
            unused = [self._open.pop(p) for p, opened in list(self._open.items()) if opened.folder == folder]
        del unused


def _is_at(place: tuple[int, int], folder: Path) -> bool:
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return place == (found.st_dev, found.st_ino)


#: Those of this process.
OPEN = OpenGenerations()
os.register_at_fork(after_in_child=OPEN.forget)
