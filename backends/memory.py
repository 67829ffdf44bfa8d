"""The `memory` backend: run files in RAM, which every worker of the machine maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.backends import local_files
from holdfast.backends.base import NO_OPTIONS
from holdfast.backends.options import parse_options, parse_size
from holdfast.backends.run import TableSchema
from holdfast.backends.run_files import RunFilesBackend
from holdfast.errors import UnavailableError


class MemoryBackend(RunFilesBackend):
    """Run files in a directory of a RAM file system.

    The state lives as long as the executor: whoever places the directory (see
    `holdfast.spark_integration.local_dirs`) puts it into ``/dev/shm`` where that is large enough, and
    says so where it is not. Nothing is synced; a version that is lost is restored from its commits.

    The option ``limit`` bounds what all shards of the executor hold. Every commit, restore and merge looks
    before it writes; those that look at the same moment may pass the limit together by what they write.
    """

    contract_version = 1
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
        self._limited = directory if executor_directory is None else executor_directory / "memory"
        self._limit_bytes: int | None = self.parse_options("memory", self.options).get("limit")

    @classmethod
    def parse_options(cls, name: str, options: Mapping[str, str]) -> Mapping[str, Any]:
        return parse_options(name, {"limit": parse_size}, options)

    def _require_room(self, wanted_bytes: int) -> None:
        if self._limit_bytes is None:
            return
        held_bytes = local_files.folder_bytes(self._limited)
        if held_bytes + wanted_bytes > self._limit_bytes:
            raise UnavailableError(
                "the state of this executor would pass spark.holdfast.memory.limit: raise the limit, give the query "
                "more executors, or take the backend 'filesystem' or 'rocksdb', and start the query again; nothing "
                "is lost",
                limit_bytes=self._limit_bytes,
                held_bytes=held_bytes,
                wanted_bytes=wanted_bytes,
            )
