"""The `memory` backend: run files in RAM, which every worker of the machine maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.backends.base import NO_OPTIONS, Pointer
from holdfast.backends.options import parse_options, parse_size
from holdfast.backends.run import Run, TableSchema
from holdfast.backends.run_files.backend import RunFilesBackend
from holdfast.backends.run_files.memory_usage import MemoryUsage
from holdfast.errors import UnavailableError


class MemoryBackend(RunFilesBackend):
    """Run files in a directory of a RAM file system.

    The state lives as long as the executor. `holdfast.spark_integration.executor.local_dirs` places the directory in
    ``/dev/shm`` if that is large enough, and says so if it is not. Nothing is synced; a lost version is restored from
    its commits.

    The option ``limit`` bounds what all shards of the executor hold. Every commit, restore and merge checks it before
    writing (`holdfast.backends.run_files.memory_usage`); those that check at the same moment may together exceed it by
    what they write.
    """

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
        # Beside it may lie the shards of backends that keep their state on disk.
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
        """Note what the shard holds after a write or a removal, if usage is kept."""
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
        """Tell whether that many more bytes fit within the limit, by the notes."""
        usage = self._usage
        return (usage.note(wanted_bytes) if usage.is_kept() else usage.recount(wanted_bytes)) <= limit_bytes
