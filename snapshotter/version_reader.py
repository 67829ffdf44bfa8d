"""Reads selected rows of a shard's versions from durable storage, without restoring the versions.

::

    version 25-ff      snapshots/20-aa ◀─ commits/21-bb ◀─ commits/23-dd ◀┄ carried: 24, 25
    reads              only parts that      whole               whole         nothing: the pointer holds them
                       may hold the keys

A snapshot's files are fetched on demand. A part's digest covers the whole part, so the part is fetched whole. RocksDB
verifies each block itself, so only the needed ranges are fetched: an uncompressed part begins with the file's bytes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from holdfast import clock
from holdfast.backends import local_files
from holdfast.backends.base import MAX_HASH, Pointer, View
from holdfast.backends.block_io import write_at
from holdfast.backends.frozen_files import ByteRange, FrozenFiles
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs
from holdfast.backends.run_stack import merge_over, merge_prefixes, scan_runs
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.commits import Commit, CommitObjects, ObjectCommitLog
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.snapshots import Manifest, Part, Snapshots, fetch_part, make_empty
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

#: Bytes of commits that a reader caches.
_KEPT_BYTES = 64 << 20
#: Snapshots that a reader keeps open.
_KEPT_SNAPSHOTS = 2
_log = logging.getLogger(__name__)


def no_rows(table: TableSchema) -> Run:
    return Run(table, pa.RecordBatch.from_pylist([], schema=table.columns))


def read_tables(log: ObjectCommitLog, pointer: Pointer, tables: Collection[str]) -> dict[str, Run]:
    """Load a version's live rows, one run per table; a table without rows may be absent."""
    rows: dict[str, Run] = {}
    reached: list[Pointer] = []
    while reached != [pointer]:
        with log.restore(pointer, reached) as restored:
            newer = {name: run for name, run in restored.runs.items() if name in tables}
        for name, run in newer.items():
            older = [rows[name]] if name in rows else []
            rows[name] = merge_runs([*older, run], drop_deletes=True)
        reached = [restored.pointer]
    return rows


class _Stretch(NamedTuple):
    """A byte range of a file, within one part."""

    file: str
    part: Part
    begin: int  #: The part's offset in the file
    start: int
    end: int
    is_whole: bool  #: Whether the stretch is the whole part


class StoredFiles(FrozenFiles):
    """A snapshot's files, fetched on demand into an empty, private `folder`. Raises `UnavailableError`."""

    def __init__(self, manifest: Manifest, shard: PrefixedStorage, folder: Path, executor: Executor) -> None:
        self.folder = folder
        self.sizes = {file.name: file.size_bytes for file in manifest.files}
        self._files = {file.name: file for file in manifest.files}
        self._part_bytes, self._shard, self._executor = manifest.part_bytes, shard, executor
        self._lock = threading.Lock()
        self._here: set[str] = set()
        for file in manifest.files:
            path = make_empty(folder, file)
            with local_files.writing(path):
                os.utime(path, ns=(file.modified_ns, file.modified_ns))

    def require(self, name: str, start: int = 0, end: int | None = None) -> None:
        self._fetch([ByteRange(name, start, self.sizes[name] if end is None else end)], whole=True)

    def bring(self, places: Sequence[ByteRange]) -> None:
        self._fetch(places, whole=False)

    def _fetch(self, places: Iterable[ByteRange], *, whole: bool) -> None:
        """Fetch `whole` parts and verify them, or fetch only the wanted ranges."""
        with self._lock:
            found = dict.fromkeys(one for place in places for one in self._stretches(place, whole=whole))
            stretches = sorted(found, key=lambda one: one.is_whole)  # verified bytes last: nothing overwrites them
            for one, data in zip(stretches, self._executor.map(self._read, stretches), strict=True):
                path, modified_ns = self.folder / one.file, self._files[one.file].modified_ns
                with local_files.writing(path), path.open("r+b", buffering=0) as out:
                    try:
                        write_at(out.fileno(), data, one.start)
                    finally:  # readers identify a file by its modification time
                        os.utime(out.fileno(), ns=(modified_ns, modified_ns))
                if one.is_whole:
                    self._here.add(one.part.key)

    def _stretches(self, place: ByteRange, *, whole: bool) -> Iterator[_Stretch]:
        for index, (part, size_bytes) in enumerate(self._files[place.name].sizes_of_parts(self._part_bytes)):
            begin = index * self._part_bytes
            start, end = max(begin, place.start), min(begin + size_bytes, place.end)
            if start < end and part.key not in self._here:
                if whole or part.size_bytes <= size_bytes:  # compressed objects cannot be read in ranges
                    start, end = begin, begin + size_bytes
                yield _Stretch(place.name, part, begin, start, end, (start, end) == (begin, begin + size_bytes))

    def _read(self, one: _Stretch) -> memoryview:
        if one.is_whole:
            return memoryview(fetch_part(self._shard, one.part, one.end - one.start))
        try:
            return self._shard.get_range(one.part.key, one.start - one.begin, one.end - one.begin)
        except NotFoundError as exc:
            raise CorruptionError(f"{self._shard.url}/{one.part.key} is missing, and a snapshot needs it") from exc


class At(NamedTuple):
    """A version of a shard."""

    pointer: Pointer
    carried: bytes | None = None  #: The version's commit, if the query's pointer carries it


class VersionReader:
    """Reads selected rows of a shard's versions. One thread at a time may use it, but none of `executor`'s."""

    def __init__(
        self,
        storage: ObjectStorage,
        shard: str,
        tables: Mapping[str, TableSchema],
        executor: Executor,
        work_folder: Callable[[], AbstractContextManager[Path]],
    ) -> None:
        self._storage, self._shard, self.tables = storage, shard, tables
        self._executor, self._work_folder = executor, work_folder
        self._objects = PrefixedStorage(storage, shard)
        self._commits = CommitObjects(self._objects, tables)
        self._kept: OrderedDict[ChainEntry, Commit] = OrderedDict()
        self._views: OrderedDict[ChainEntry, tuple[View, ExitStack]] = OrderedDict()
        self._damaged: set[ChainEntry] = set()
        self._lock = threading.Lock()

    def find(self, at: At, table: str, prefixes: Keys) -> Run:
        """Return the live rows whose keys begin with one of `prefixes`."""
        newest, schema = self.newest(at), self.tables[table]
        runs = [run.with_prefixes(prefixes) for run in self._written(newest, schema)]
        snapshot = newest.lineage.snapshot
        if snapshot is not None:
            try:
                runs = [*self._view(snapshot).scan_prefix(table, prefixes), *runs]
            except CorruptionError as exc:
                self._give_up(snapshot, exc)
                runs = list(merge_prefixes(self._rows_around(at, table), prefixes))
        return merge_runs([no_rows(schema), *runs], drop_deletes=True)

    def scan(self, at: At, table: str, first_hash: int = 0) -> Iterator[Run]:
        """Yield the live rows by hash, beginning at `first_hash`; after an error, a new scan bypasses the snapshot."""
        newest, schema = self.newest(at), self.tables[table]
        writes = [run.slice(first_hash, MAX_HASH) for run in self._written(newest, schema)]
        snapshot = newest.lineage.snapshot
        if snapshot is None:
            yield from scan_runs(writes, first_hash, MAX_HASH)
            return
        if snapshot in self._damaged:
            below = (run.slice(first_hash, MAX_HASH) for run in self._rows_around(at, table))
            yield from merge_over(below, [])
            return
        try:
            yield from merge_over(self._view(snapshot).scan(table, first_hash), writes)
        except CorruptionError as exc:
            self._give_up(snapshot, exc)
            raise

    def newest(self, at: At) -> Commit:
        """Return a version's own commit, whose lineage names the other objects; raises the same errors as `find`."""
        if at.carried is not None:
            return self._commits.decode_carried(at.carried, at.pointer)
        with self._lock:
            kept = next((one for entry, one in self._kept.items() if entry.pointer == at.pointer), None)
        return kept or self._keep(self._commits.fetch_newest(at.pointer))

    def _written(self, newest: Commit, schema: TableSchema) -> Iterator[Run]:
        """Yield the rows that a version's commits wrote to a table since its snapshot, oldest first."""
        commits = chain(ahead(self._executor, self.commit, newest.lineage.commits), [newest])
        return (run for one in commits if (run := one.run_of(schema)) is not None)

    def commit(self, entry: ChainEntry) -> Commit:
        """Return the commit of a chain entry; raises the same errors as `find`."""
        with self._lock:
            kept = self._kept.get(entry)
        return kept or self._keep(self._commits.fetch(entry))

    def _keep(self, commit: Commit) -> Commit:
        if commit.size_bytes <= _KEPT_BYTES:
            with self._lock:
                self._kept[commit.entry] = commit
                while sum(one.size_bytes for one in self._kept.values()) > _KEPT_BYTES:
                    self._kept.popitem(last=False)
        return commit

    def _view(self, snapshot: ChainEntry) -> View:
        if snapshot in self._damaged:
            raise CorruptionError(f"{self._objects.url}/{snapshot.key} is damaged")
        if snapshot not in self._views:
            with ExitStack() as undo:
                home = undo.enter_context(self._work_folder())
                (home / "files").mkdir(mode=0o700)
                manifest = Snapshots(self._objects, self._executor, home).read_manifest(snapshot)
                files = StoredFiles(manifest, self._objects, home / "files", self._executor)
                try:
                    backend = find_backend(manifest.backend)
                except InvalidArgumentError as exc:
                    raise CorruptionError(f"a snapshot cannot be opened here: {exc}", key=snapshot.key) from exc
                opened = backend.open_frozen(snapshot.pointer, self.tables, files, clock.new_id)
                self._views[snapshot] = undo.enter_context(opened), undo.pop_all()
            while len(self._views) > _KEPT_SNAPSHOTS:
                self._views.popitem(last=False)[1][1].close()
        return self._views[snapshot][0]

    def _rows_around(self, at: At, table: str) -> list[Run]:
        """Return a table's live rows from older objects, because the version's snapshot is damaged."""
        with self._work_folder() as home:
            carried = {} if at.carried is None else {at.pointer: at.carried}
            log = ObjectCommitLog(self._storage, self._shard, self.tables, self._executor, home, carried=carried)
            return list(read_tables(log, at.pointer, [table]).values())

    def _give_up(self, snapshot: ChainEntry, damage: CorruptionError) -> None:
        if snapshot not in self._damaged:
            _log.warning("ignoring the damaged snapshot %s/%s: %s", self._objects.url, snapshot.key, damage)
        self._damaged.add(snapshot)
        if snapshot in self._views:
            self._views.pop(snapshot)[1].close()

    def close(self) -> None:
        while self._views:
            self._views.popitem()[1][1].close()
