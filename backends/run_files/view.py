"""Views of versions on run files: a local version is mapped whole, a frozen version is read stretch by stretch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.arrow.rows import HashArray
from holdfast.backends.base import MAX_HASH, Found, Pointer, View
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.local.errors import reading
from holdfast.backends.local.folder_locks import FolderLock
from holdfast.backends.run import Run, read_stretches
from holdfast.backends.run_files.version_file import VERSION, RunFile, VersionFile
from holdfast.backends.run_files.written_run import StretchIndex
from holdfast.backends.run_stack import (
    Stacked,
    look_up,
    merge_prefixes,
    parts_of,
    prefixes_above,
    scan_above,
    scan_runs,
)
from holdfast.backends.schema import Keys, TableSchema, find_table, require_declared
from holdfast.errors import ClosedError, CorruptionError

#: Bytes fetched from a run file's end for its footer; a larger footer needs a second fetch.
_END_BYTES = 64 << 10
_RUN = "run"
#: The footer's size, and its distance from the end of a stored file.
_FOOTER_SIZE, _FOOTER_SIZE_AT = struct.Struct("<I"), 32


class _RunsView(View):
    """A version made of runs over an optional floor."""

    _tables: Mapping[str, TableSchema]
    _floor: View | None

    def _merged(self, table: str, runs: Sequence[Run], first_hash: int, last_hash: int) -> Iterator[Run]:
        """Yield a table's live rows in a hash range, from `runs` and the floor."""
        if self._floor is None:
            return self._projected(table, scan_runs(runs, first_hash, last_hash))
        return self._projected(table, scan_above(partial(self._floor.scan, table), runs, first_hash, last_hash))

    def _merged_prefixes(self, table: str, runs: Sequence[Run], prefixes: Keys) -> Iterator[Run]:
        """Yield the live rows that begin with one of `prefixes`, from `runs` and the floor."""
        if self._floor is None:
            return self._projected(table, merge_prefixes(runs, prefixes))
        return self._projected(table, prefixes_above(self._floor.scan_prefix(table, prefixes), runs, prefixes))

    def _projected(self, table: str, runs: Iterator[Run]) -> Iterator[Run]:
        schema = self._tables[table]
        return (run.projected(schema) for run in runs)

    def close(self) -> None:
        if self._floor is not None:
            self._floor.close()


class RunFilesView(_RunsView):
    """A local version, mapped whole, over an optional `floor`; `lock` marks the shard's directory as in use."""

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
        return self._merged(table, parts_of(self.stack(table)), first_hash, last_hash)

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        return self._merged_prefixes(table, parts_of(self.stack(table)), prefixes)

    def crowded(self, table: str) -> HashArray:
        below = [] if self._floor is None else [self._floor.crowded(table)]
        return np.concatenate([*(part.crowded for part in parts_of(self.stack(table))), *below, np.empty(0, np.uint64)])

    def close(self) -> None:
        self._stacks = None
        super().close()
        if self._lock is not None:
            self._lock.close()


class FrozenRuns(_RunsView):
    """A frozen version, fetched as it is read, over the floor that `open_floor` opens, if any."""

    def __init__(
        self,
        pointer: Pointer,
        tables: Mapping[str, TableSchema],
        files: FrozenFiles,
        open_floor: Callable[[FrozenFiles, Mapping[str, TableSchema]], View] | None = None,
    ) -> None:
        self._files, self._tables = files, tables
        self._bring(VERSION)
        self._version = VersionFile.read(files.folder, str(pointer))
        require_declared(self._version.stacks, tables)
        self._runs: dict[str, FrozenRun] = {}
        self._floor = None
        if self._version.generation is not None:
            if open_floor is None:
                raise CorruptionError(f"{files.folder} holds a version of a different backend")
            self._floor = open_floor(files, tables)

    @property
    def properties(self) -> Mapping[str, Any]:
        return self._version.properties

    def get(self, table: str, keys: Keys) -> Found:
        return look_up(list(self.scan_prefix(table, keys)), keys, find_table(self._tables, table))

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        find_table(self._tables, table)
        stack = self._stack(table)
        while first_hash <= last_hash:
            # Up to the end of the shortest stretch.
            until = min([last_hash, *(run.end_of_stretch(first_hash) for run in stack)])
            found = [part for run in stack for part in run.read(first_hash, until)]
            yield from self._merged(table, found, first_hash, until)
            first_hash = until + 1

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        find_table(self._tables, table)
        stack, hashes = self._stack(table), np.unique(prefixes.hashes)
        start = 0
        while start < len(hashes):
            first = int(hashes[start])
            until = min([MAX_HASH, *(run.end_of_stretch(first) for run in stack)])
            end = int(np.searchsorted(hashes, np.uint64(until), side="right"))
            near = prefixes.take(
                np.flatnonzero((prefixes.hashes >= hashes[start]) & (prefixes.hashes <= hashes[end - 1]))
            )
            found = [part for run in stack for part in run.read(first, int(hashes[end - 1]))]
            yield from self._merged_prefixes(table, found, near)
            start = end

    def close(self) -> None:
        self._runs.clear()
        super().close()

    def _stack(self, table: str) -> list[FrozenRun]:
        files = self._version.stacks.get(table, [])
        for file in files:
            if file.id not in self._runs:
                self._bring(file.name, file)
                self._runs[file.id] = FrozenRun(self._files, file, self._tables[table])
        return [self._runs[file.id] for file in files]

    def _bring(self, name: str, file: RunFile | None = None) -> None:
        """Check that a file exists with the right size, and fetch it; for a run, fetch only its end."""
        size = self._files.sizes.get(name)
        if size is None or (size > stored_file.NOTICE_BYTES_MAX if file is None else size != file.file_bytes):
            raise CorruptionError(f"{self._files.folder / name} is missing or has the wrong size", size_bytes=size)
        self._files.require(name, 0 if file is None else max(0, size - _END_BYTES))


class FrozenRun:
    """One run file, read stretch by stretch; its end is already local."""

    def __init__(self, files: FrozenFiles, file: RunFile, schema: TableSchema) -> None:
        self._files, self._file, self._schema = files, file, schema
        self._path = files.folder / file.name
        self._source = str(self._path)
        with reading(self._path), pa.memory_map(self._source) as mapped:
            self._bytes = mapped.read_buffer()
        if self._bytes.size >= _FOOTER_SIZE_AT:
            (footer_bytes,) = _FOOTER_SIZE.unpack_from(self._bytes, self._bytes.size - _FOOTER_SIZE_AT)
            files.require(file.name, max(0, self._bytes.size - _FOOTER_SIZE_AT - footer_bytes))
        # Bytes are verified when they are fetched; most are never fetched.
        stored = stored_file.decode(self._bytes, source=self._source, kind=_RUN, verify=False)
        self._section = stored.section(schema.name, self._source)
        self._index = StretchIndex.read(stored.header, self._section.size, self._source)

    def end_of_stretch(self, hash_: int) -> int:
        """Return the last hash of the stretch that may hold a hash; for the last stretch, the largest hash."""
        if self._index is None:
            return MAX_HASH
        places = self._index.within(hash_, hash_)
        return (
            self._index.last_hashes[places[0]] if len(places) and places[0] + 1 < len(self._index.places) else MAX_HASH
        )

    def read(self, first_hash: int, last_hash: int) -> list[Run]:
        if self._index is None:
            self._files.require(self._file.name)
            # Uncompressed, so its decoded size is its own.
            stretches = read_stretches(self._section, self._schema, source=self._source, plain_bytes=self._section.size)
        else:
            stretches = [self._stretch(self._index, number) for number in self._index.within(first_hash, last_hash)]
        return [run for run in (one.slice(first_hash, last_hash) for one in stretches) if len(run)]

    def _stretch(self, index: StretchIndex, number: int) -> Run:
        begin, end = index.places[number]
        self._files.require(self._file.name, begin, end)
        # Made a complete stream, so that it is read and checked like a whole file.
        stretch = self._section.slice(begin, end - begin).to_pybytes()
        stream = pa.py_buffer(index.columns.serialize().to_pybytes() + stretch)
        return Run.read(stream, self._schema, source=self._source, plain_bytes=len(stretch))
