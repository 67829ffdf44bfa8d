"""How one version is read from run files: a view on a stack of mapped runs for each table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from holdfast.backends.base import MAX_HASH, Found, Pointer, View
from holdfast.backends.local.folder_locks import FolderLock
from holdfast.backends.run import Run
from holdfast.backends.run_stack import (
    Stacked,
    look_up,
    merge_prefixes,
    parts_of,
    prefixes_above,
    scan_above,
    scan_runs,
)
from holdfast.backends.schema import Keys, TableSchema, find_table
from holdfast.errors import ClosedError


class RunFilesView(View):
    """A version on run files, mapped as a whole when the view is opened; so nothing can take it away.

    `lock` shows others that the shard's directory is in use while the view is open; `floor` lies below the runs.
    """

    def __init__(
        self,
        pointer: Pointer,
        tables: Mapping[str, TableSchema],
        stacks: Mapping[str, Sequence[Stacked]],
        properties: Mapping[str, Any],
        lock: FolderLock | None = None,
        floor: View | None = None,
    ) -> None:
        self._lock, self._floor = lock, floor
        self.pointer = pointer
        self._tables = tables
        self._stacks: Mapping[str, Sequence[Stacked]] | None = stacks
        self._properties = properties

    @property
    def properties(self) -> Mapping[str, Any]:
        return self._properties

    def stack(self, table: str) -> Sequence[Stacked]:
        """Return the runs of `table`, oldest first."""
        if self._stacks is None:
            raise ClosedError("the view was closed: open a new one", pointer=self.pointer)
        find_table(self._tables, table)
        return self._stacks.get(table, [])

    def get(self, table: str, keys: Keys) -> Found:
        below = None if self._floor is None else partial(self._floor.get, table)
        return look_up(self.stack(table), keys, self._tables[table], below)

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        runs = parts_of(self.stack(table))
        if self._floor is None:
            return self._projected(table, scan_runs(runs, first_hash, last_hash))
        return self._projected(table, scan_above(partial(self._floor.scan, table), runs, first_hash, last_hash))

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        runs = parts_of(self.stack(table))
        if self._floor is None:
            return self._projected(table, merge_prefixes(runs, prefixes))
        return self._projected(table, prefixes_above(self._floor.scan_prefix(table, prefixes), runs, prefixes))

    def _projected(self, table: str, runs: Iterator[Run]) -> Iterator[Run]:
        schema = self._tables[table]
        return (run.projected(schema) for run in runs)

    def close(self) -> None:
        self._stacks = None
        if self._floor is not None:
            self._floor.close()
        if self._lock is not None:
            self._lock.close()
