"""The `memory` backend: run files in RAM that every worker on the machine maps, and a record of their size.

The total size of an executor's shards is known without measuring all shards::

    <folder>/
        9f3c….1048576 ──▶ query/totals/shard-0003-1f0c77ab     a link to the shard, named after its size in bytes
        04aa….52428800 ──▶ …

Each shard has one entry, named after the shard and its size in bytes, and replaces it when it writes or frees
something. There is no lock: an entry is changed by its own shard, except for corrections.

Invariants
----------
* **rarely too low**: bytes are recorded before they are written, and again afterwards. A correction made while the
  shard is writing misses the bytes not yet written. A kill in between leaves an entry that is too high; two processes
  that record the same shard at the same moment may leave two entries.
* **corrected**: a shard's size is measured, not added up. Each record also corrects the entry of a random other shard,
  or removes it if that shard is gone. Before the limit becomes an error, all shards are measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from holdfast.backends.base import NO_OPTIONS, Pointer
from holdfast.backends.local_files import folder_bytes, make_private_folder, writing
from holdfast.backends.options import parse_options, parse_size
from holdfast.backends.run import Run, TableSchema
from holdfast.backends.run_files.backend import RunFilesBackend
from holdfast.errors import UnavailableError

#: Every shard directory on run files has this folder.
_MARK_OF_SHARD = "versions"


class MemoryUsage:
    """The entries of one executor in `folder`, for one of the shards below `root`."""

    def __init__(self, folder: Path, root: Path, shard: Path, new_id: Callable[[], str]) -> None:
        self._folder = folder
        self._root = root
        self._shard = shard
        self._new_id = new_id

    def is_kept(self) -> bool:
        """Return whether usage is recorded, because a shard of the executor has a limit."""
        return self._folder.is_dir()

    def note(self, more_bytes: int = 0) -> int:
        """Record this shard's size plus `more_bytes`; return the executor's total. Cost: a walk through two shards."""
        with writing(self._folder):
            entries = self._entries()
            held = self._note(entries, self._shard, more_bytes)
            mine = _owner(self._root, self._shard)
            others = [name for name in entries if not name.startswith(mine)]
            if others:
                self._check(others[xxhash.xxh32_intdigest(self._new_id().encode()) % len(others)])
            return held + sum(map(_bytes_of, others))

    def recount(self, more_bytes: int = 0) -> int:
        """Measure and record all shards; return the total plus `more_bytes`. Cost: a walk through all shards."""
        with writing(self._folder):
            make_private_folder(self._folder)
            entries, total, found = self._entries(), 0, set()
            for shard in self._shards():
                total += self._note(entries, shard, more_bytes if shard == self._shard else 0)
                found.add(_owner(self._root, shard))
            for name in entries:
                if name.partition(".")[0] not in found:
                    (self._folder / name).unlink(missing_ok=True)
            return total

    def _entries(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if name.partition(".")[2].isdigit()]

    def _shards(self) -> Iterator[Path]:
        for parent, folders, _ in os.walk(self._root):
            if _MARK_OF_SHARD in folders:
                folders.clear()
                yield Path(parent)

    def _note(self, entries: list[str], shard: Path, more_bytes: int) -> int:
        """Replace a shard's entries by a single entry with its size; return the size."""
        owner = _owner(self._root, shard)
        held = folder_bytes(shard) + more_bytes
        old, new = [name for name in entries if name.startswith(owner)], f"{owner}.{held}"
        if new not in old:
            with suppress(FileExistsError):  # another process records the same size
                os.symlink(os.path.relpath(shard, self._folder), self._folder / new)
        for name in old:
            if name != new:
                (self._folder / name).unlink(missing_ok=True)
        return held

    def _check(self, name: str) -> None:
        """Correct the entry of a shard; remove it if the shard is gone."""
        with suppress(FileNotFoundError):
            shard = Path(os.path.normpath(self._folder / os.readlink(self._folder / name)))
            if shard.is_dir():
                self._note([name], shard, 0)
            else:
                (self._folder / name).unlink()


def _owner(root: Path, shard: Path) -> str:
    """Return the part of an entry's name that identifies the shard."""
    return xxhash.xxh3_128_hexdigest(os.fsencode(os.path.relpath(shard, root)))


def _bytes_of(name: str) -> int:
    return int(name.partition(".")[2])


class MemoryBackend(RunFilesBackend):
    """Run files on a RAM file system, not synced; the option ``limit`` bounds the size of all shards of an executor."""

    contract_version = 2
    in_memory = True

    def __init__(
        self,
        directory: Path,
        tables: Mapping[str, TableSchema],
        new_id: Callable[[], str],
        options: Mapping[str, str] = NO_OPTIONS,
        executor_directory: Path | None = None,
    ) -> None:
        super().__init__(directory, tables, new_id, options, executor_directory)
        # Shards of disk-based backends may be next to this directory.
        limited = directory if executor_directory is None else executor_directory / "memory"
        self._usage = MemoryUsage(self.executor_directory / "memory-held", limited, directory, new_id)
        self._limit_bytes: int | None = self.parse_options("memory", self.options).get("limit")

    @classmethod
    def parse_options(cls, name: str, options: Mapping[str, str]) -> Mapping[str, Any]:
        return parse_options(name, {"limit": parse_size}, options)

    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        with self._noting():
            super().apply(base, new, runs, properties)

    def load(self, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        with self._noting():
            super().load(pointer, runs, properties)

    def thaw(self, pointer: Pointer, folder: Path) -> None:
        with self._noting():
            super().thaw(pointer, folder)

    def drop(self, pointers: Iterable[Pointer]) -> None:
        with self._noting():
            super().drop(pointers)

    def maintain(self, pointer: Pointer) -> int:
        with self._noting():
            return super().maintain(pointer)

    def remove_leftovers(self, before_ns: int) -> int:
        with self._noting():
            return super().remove_leftovers(before_ns)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Record the shard's size after a write or a removal, if usage is recorded."""
        try:
            yield
        finally:
            if self._usage.is_kept():
                self._usage.note()

    def _require_room(self, wanted_bytes: int) -> None:
        if self._limit_bytes is None or self._is_below(self._limit_bytes, wanted_bytes):
            return
        held_bytes = self._usage.recount()
        if held_bytes + wanted_bytes > self._limit_bytes:
            raise UnavailableError(
                "the state of this executor would exceed spark.holdfast.memory.limit: raise the limit, give the query "
                "more executors, or switch to the backend 'filesystem' or 'rocksdb', and restart the query; nothing "
                "is lost",
                limit_bytes=self._limit_bytes,
                held_bytes=held_bytes,
                wanted_bytes=wanted_bytes,
            )

    def _has_room(self, wanted_bytes: int) -> bool:
        # A merge can wait, so measuring all shards is not worth it.
        return self._limit_bytes is None or self._is_below(self._limit_bytes, wanted_bytes)

    def _is_below(self, limit_bytes: int, wanted_bytes: int) -> bool:
        """Return whether `wanted_bytes` more fit within the limit, judging by the entries."""
        usage = self._usage
        return (usage.note(wanted_bytes) if usage.is_kept() else usage.recount(wanted_bytes)) <= limit_bytes
