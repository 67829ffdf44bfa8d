"""A frozen version on run files that is read where it lies: the version file, and of each run the stretches wanted.

A run file of several stretches has an index of them at its end (`holdfast.backends.run_files.written_run`); any other
one is small, and brought as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.base import MAX_HASH, Found, Pointer, View
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.local.errors import reading
from holdfast.backends.run import Run, read_stretches
from holdfast.backends.run_files.version_file import VERSION, RunFile, VersionFile
from holdfast.backends.run_files.written_run import StretchIndex
from holdfast.backends.run_stack import look_up, merge_prefixes, prefixes_above, scan_above, scan_runs
from holdfast.backends.schema import Keys, TableSchema, find_table, require_declared
from holdfast.errors import CorruptionError

#: How much of a run file's end is brought for its footer; it tells if there is more.
_END_BYTES = 64 << 10
_RUN = "run"
#: Of a stored file: where it says how many bytes the footer before that has.
_FOOTER_SIZE, _FOOTER_SIZE_AT = struct.Struct("<I"), 32


class FrozenRuns(View):
    """See the module.

    `open_floor` opens what lies below the runs. Raises `CorruptionError`, `SchemaMismatchError`, `UnavailableError` if
    the files hold no such version, or cannot be had.
    """

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
        self._floor: View | None = None
        if self._version.generation is not None:
            if open_floor is None:
                raise CorruptionError(f"{files.folder} holds a version of another backend")
            self._floor = open_floor(files, tables)

    @property
    def properties(self) -> Mapping[str, Any]:
        return self._version.properties

    def get(self, table: str, keys: Keys) -> Found:
        return look_up(list(self.scan_prefix(table, keys)), keys, find_table(self._tables, table))

    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        schema, stack = find_table(self._tables, table), self._stack(table)
        while first_hash <= last_hash:
            # As far as one stretch of each run goes.
            until = min([last_hash, *(run.end_of_stretch(first_hash) for run in stack)])
            found = [part for run in stack for part in run.read(first_hash, until)]
            if self._floor is None:
                merged = scan_runs(found, first_hash, until)
            else:
                merged = scan_above(partial(self._floor.scan, table), found, first_hash, until)
            yield from (run.projected(schema) for run in merged)
            first_hash = until + 1

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        schema, stack = find_table(self._tables, table), self._stack(table)
        hashes = np.unique(prefixes.hashes)
        start = 0
        while start < len(hashes):
            first = int(hashes[start])
            until = min([MAX_HASH, *(run.end_of_stretch(first) for run in stack)])
            end = int(np.searchsorted(hashes, np.uint64(until), side="right"))
            near = prefixes.take(
                np.flatnonzero((prefixes.hashes >= hashes[start]) & (prefixes.hashes <= hashes[end - 1]))
            )
            found = [part for run in stack for part in run.read(first, int(hashes[end - 1]))]
            if self._floor is None:
                merged = merge_prefixes(found, near)
            else:
                merged = prefixes_above(self._floor.scan_prefix(table, near), found, near)
            yield from (run.projected(schema) for run in merged)
            start = end

    def close(self) -> None:
        self._runs.clear()
        if self._floor is not None:
            self._floor.close()

    def _stack(self, table: str) -> list[FrozenRun]:
        """Return the runs of a table, oldest first."""
        files = self._version.stacks.get(table, [])
        for file in files:
            if file.id not in self._runs:
                self._bring(file.name, file)
                self._runs[file.id] = FrozenRun(self._files, file, self._tables[table])
        return [self._runs[file.id] for file in files]

    def _bring(self, name: str, file: RunFile | None = None) -> None:
        """Check that a file is there, as large as it should be, and bring it, or of a run its end."""
        size = self._files.sizes.get(name)
        if size is None or (size > stored_file.NOTICE_BYTES_MAX if file is None else size != file.file_bytes):
            raise CorruptionError(f"{self._files.folder / name} is missing, or of a wrong size", size_bytes=size)
        self._files.require(name, 0 if file is None else max(0, size - _END_BYTES))


class FrozenRun:
    """One run file, read stretch by stretch; its end has been brought."""

    def __init__(self, files: FrozenFiles, file: RunFile, schema: TableSchema) -> None:
        self._files, self._file, self._schema = files, file, schema
        self._path = files.folder / file.name
        self._source = str(self._path)
        with reading(self._path), pa.memory_map(self._source) as mapped:
            self._bytes = mapped.read_buffer()
        if self._bytes.size >= _FOOTER_SIZE_AT:
            (footer_bytes,) = _FOOTER_SIZE.unpack_from(self._bytes, self._bytes.size - _FOOTER_SIZE_AT)
            files.require(file.name, max(0, self._bytes.size - _FOOTER_SIZE_AT - footer_bytes))
        # Its bytes are verified as they are brought, and most of them never are.
        stored = stored_file.decode(self._bytes, source=self._source, kind=_RUN, verify=False)
        self._section = stored.section(schema.name, self._source)
        self._index = StretchIndex.read(stored.header, self._section.size, self._source)

    def end_of_stretch(self, hash_: int) -> int:
        """Return up to which hash the stretch goes that has a hash; the last one, and a small file, go to the end."""
        if self._index is None:
            return MAX_HASH
        places = self._index.within(hash_, hash_)
        return (
            self._index.last_hashes[places[0]] if len(places) and places[0] + 1 < len(self._index.places) else MAX_HASH
        )

    def read(self, first_hash: int, last_hash: int) -> list[Run]:
        """Return the rows with a hash in [first_hash, last_hash]."""
        if self._index is None:
            self._files.require(self._file.name)
            # As it lies in memory: it unpacks to no more than it is.
            stretches = read_stretches(self._section, self._schema, source=self._source, plain_bytes=self._section.size)
        else:
            stretches = [self._stretch(self._index, number) for number in self._index.within(first_hash, last_hash)]
        return [run for run in (one.slice(first_hash, last_hash) for one in stretches) if len(run)]

    def _stretch(self, index: StretchIndex, number: int) -> Run:
        begin, end = index.places[number]
        self._files.require(self._file.name, begin, end)
        # A stream of its own: so it is read, and checked, as a whole file is.
        stretch = self._section.slice(begin, end - begin).to_pybytes()
        stream = pa.py_buffer(index.columns.serialize().to_pybytes() + stretch)
        return Run.read(stream, self._schema, source=self._source, plain_bytes=len(stretch))
