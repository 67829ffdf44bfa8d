"""One RocksDB database: a lineage of versions that differ by what was written between them.

::

    positions        0          1          2          3
    versions         3-aa ────▶ 4-bb
                       └────────────────▶ 4-cc ────▶ 5-dd      ← the present: what the rows say now
    change log              keys of 4-bb  keys of    keys of
                                          4-bb and   5-dd
                                          of 4-cc

A version is a RocksDB snapshot with its name, its properties and the position of the write that made it. The rows
are those of the newest write. To go on from an older version (Spark dropped an attempt), what was written since is
written back, as the older snapshot has it, in the same batch as the new version's rows: a branch costs as much as
it undoes, and readers of other versions are not disturbed.

Invariants
----------
* **present**: the rows are those of the version whose position is the log's. The position moves before the
  first row changes, and a write that fails leaves a position without version: the next one undoes it.
* **marked**: the marker is part of each batch (`holdfast.backends.rocksdb.marker`).
* **what survives**: a clean `close` keeps two versions: the oldest one, which is the one that the query has accepted
  (older ones were dropped), and the present or, where that is the oldest, the newest. A kill, or a power cut, keeps
  what RocksDB last flushed: one whole older version, or none while a version of several batches is written. There is
  no write-ahead log.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import chain
from pathlib import Path

import pyarrow as pa
from rocksdict import Checkpoint, Options, Rdict, Snapshot

from holdfast.backends.base import Pointer
from holdfast.backends.local_files import writing
from holdfast.backends.rocksdb.errors import damaged, rocksdb_errors
from holdfast.backends.rocksdb.marker import MARKER_KEY, UNDO_END, UNDO_PREFIX, Marker, VersionLabel
from holdfast.backends.rocksdb.options import open_rocksdb
from holdfast.backends.rocksdb.reads import TableReader, read_rows
from holdfast.backends.rocksdb.writes import CHANGES_PREFIX, ChangeLog, RowWriter, Written, keys_written, without_log
from holdfast.backends.run import Run
from holdfast.errors import ClosedError, ConflictError, HoldfastError, NotFoundError

#: `maintain` flushes after so many versions, so that after a kill no more commits need be replayed.
FLUSH_VERSIONS = 32


class OpenVersion:
    """One version of a database; its snapshot goes when the database is closed."""

    def __init__(self, label: VersionLabel, position: int, snapshot: Snapshot) -> None:
        self.label = label
        self.pointer, self.properties = label
        self.position = position
        self.snapshot: Snapshot | None = snapshot

    @property
    def open_snapshot(self) -> Snapshot:
        """The snapshot.

        Raises
        ------
        ClosedError
            The database was closed.
        """
        if self.snapshot is None:
            raise ClosedError("the database of this version was closed: open a new view", pointer=self.pointer)
        return self.snapshot


class Database:
    """See the module. Safe for threads: reads run side by side, also during a write; writes take turns.

    Parameters
    ----------
    path : pathlib.Path
        A directory that `holdfast.backends.rocksdb.closed_database.create_database` made.
    options : Options
    write_buffer_bytes : callable
        Returns what may be gathered in memory before it is flushed; it changes with the number of shards.

    Raises
    ------
    NotFoundError
        The files hold no whole version: a kill came while one of several batches was written.
    CorruptionError, UnavailableError, SchemaMismatchError
        See `rocksdb_errors` and `Marker.decode`.
    """

    def __init__(self, path: Path, options: Options, write_buffer_bytes: Callable[[], int]) -> None:
        self.path = path
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._write_lock = threading.Lock()
        self._readers = 0
        self._log = ChangeLog(path)
        self._versions: dict[Pointer, OpenVersion] = {}
        self._alive: weakref.WeakSet[OpenVersion] = weakref.WeakSet()
        self._failure: HoldfastError | None = None
        self._unflushed_versions = self._unflushed_bytes = 0
        self._write_buffer_bytes = write_buffer_bytes
        self._buffer_bytes = 0
        with writing(path):
            for file in path.glob(f"{CHANGES_PREFIX}*"):
                file.unlink()
        with rocksdb_errors(path):
            self._rdict: Rdict | None = open_rocksdb(path, options)
            try:
                self._marker = self._recover(self._rdict)
            except BaseException:
                self._shut()
                raise

    def _recover(self, rdict: Rdict) -> Marker:
        """Register the version that the files hold, and the other one that a clean close has kept beside it."""
        value = rdict.get(MARKER_KEY)
        if value is None:
            raise damaged(self.path, "it has no marker")
        marker = Marker.decode(value, self.path)
        if marker.version is None:
            raise NotFoundError(f"{self.path} holds an unfinished version")
        self._add(rdict, marker.version)
        other, settled = marker.undo, marker.labelled(marker.undo or marker.version)
        if other is None:
            if read_rows(rdict, UNDO_PREFIX, UNDO_END, 1).keys:  # of no version: a later one must not get them
                rdict.delete_range(UNDO_PREFIX, UNDO_END, without_log())
            return settled
        writer = RowWriter(rdict, marker.labelled(None).encode())
        restored: list[bytes] = []
        rest: bytes | None = UNDO_PREFIX
        while rest is not None:
            rows = read_rows(rdict, rest, UNDO_END)
            rest = rows.rest
            restored += writer.take_undo(rows.keys, rows.values)
        self._log.append(self._log.hold(Written.of(pa.array(restored, pa.large_binary()))))
        writer.finish(settled.encode())
        self._add(rdict, other)
        return settled

    @property
    def marker(self) -> Marker:
        """Tables and schemas that the database holds."""
        return self._marker

    @property
    def pointers(self) -> list[Pointer]:
        """The versions held."""
        with self._condition:
            return list(self._versions)

    def version(self, pointer: Pointer) -> OpenVersion:
        """Return a version; it can be read while the caller holds it, though it be dropped.

        Raises
        ------
        NotFoundError
            It is not held here.
        """
        with self._condition:
            self._require_open()
            if pointer not in self._versions:
                raise NotFoundError("no such version", pointer=pointer)
            return self._versions[pointer]

    @contextmanager
    def reading(self, version: OpenVersion, table_id: int) -> Iterator[TableReader]:
        """Give a reader of one table of a version; the database is not closed while the context lasts.

        Raises
        ------
        ClosedError
            The database was closed.
        """
        with self._using(version) as (rdict, snapshot):
            reader = TableReader(rdict, snapshot, table_id, partial(self._log.keys_since, version.position, table_id))
            del rdict, snapshot
            try:
                yield reader
            finally:
                reader.close()

    @contextmanager
    def _using(self, version: OpenVersion) -> Iterator[tuple[Rdict, Snapshot]]:
        if os.getpid() != self._process:
            raise ClosedError("a view cannot be used after a fork: open a backend in the new process")
        with self._condition:
            rdict, snapshot = self._require_open(), version.open_snapshot
            self._readers += 1
        try:
            with rocksdb_errors(self.path):
                yield rdict, snapshot
        finally:
            del rdict, snapshot
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    def apply(self, base: Pointer, new: VersionLabel, runs: Mapping[str, Run]) -> None:
        """Make version `new` from `base`.

        Raises
        ------
        NotFoundError, ConflictError, UnavailableError
            No version was made.
        """
        with self._write_lock, rocksdb_errors(self.path):
            rdict, old = self._require_open(), self.version(base)
            if new.pointer in self._versions:
                raise ConflictError("the version exists already", pointer=new.pointer)
            runs = {table: run for table, run in runs.items() if len(run)}
            marker = self._marker.with_tables(run.schema for run in runs.values())
            undone = self._log.different_since(old.position)
            written = (keys for table, run in runs.items() for keys in keys_written(marker.tables[table].id, run))
            noted = self._log.hold(chain(undone, written))
            with self._condition:
                self._log.append(noted)
            writer = RowWriter(rdict, marker.labelled(None).encode())
            for part in undone:  # a repeated attempt mostly writes the same keys, and what they had is not needed
                writer.restore(part.keys_without(noted[len(undone) :]), old.open_snapshot)
            for table, run in runs.items():
                writer.write_run(marker.tables[table], run)
            writer.finish(marker.labelled(new).encode())
            with self._condition:
                self._marker = marker
                self._add(rdict, new)
            self._flush_if_large(rdict, writer.written_bytes)

    def _flush_if_large(self, rdict: Rdict, written_bytes: int) -> None:
        """Begin a flush where the write buffer is full.

        RocksDB looks only before the next write: until then a database that rests keeps its memory, and the disk holds
        the first part of a version that was larger than the buffer.
        """
        self._unflushed_versions += 1
        self._unflushed_bytes += written_bytes
        size = self._write_buffer_bytes()
        if size != self._buffer_bytes:
            rdict.set_options({"write_buffer_size": str(size)})
            self._buffer_bytes = size
        if self._unflushed_bytes >= size:
            rdict.flush(wait=False)
            self._unflushed_versions = self._unflushed_bytes = 0

    def _add(self, rdict: Rdict, label: VersionLabel) -> None:
        version = OpenVersion(label, self._log.position, rdict.snapshot())
        self._versions[label.pointer] = version
        self._alive.add(version)

    def drop(self, pointers: set[Pointer]) -> None:
        """Forget versions; unknown ones are fine."""
        with self._condition:
            for pointer in pointers & self._versions.keys():
                del self._versions[pointer]

    def trim(self) -> bool:
        """Forget changes that no version needs which is held or read; tell whether there is any such version."""
        with self._condition:
            positions = [version.position for version in self._alive]
            self._log.trim(min(positions, default=self._log.position))
            return bool(positions)

    def copy(self, pointer: Pointer, target: Path, options: Options) -> None:
        """Make a database at `target` that holds one version; its files are hard links where they can be.

        Raises
        ------
        NotFoundError
            The version is not held here.
        """
        with self._write_lock, rocksdb_errors(self.path):
            rdict, version = self._require_open(), self.version(pointer)
            Checkpoint(rdict).create_checkpoint(str(target))
            self._unflushed_versions = self._unflushed_bytes = 0
            marker, is_present = self._marker, version.position == self._log.position
            undone = self._log.different_since(version.position)
        if not is_present:
            with rocksdb_errors(target):
                self._undo_in(target, options, version, undone, marker)

    def _undo_in(
        self, target: Path, options: Options, version: OpenVersion, undone: list[Written], marker: Marker
    ) -> None:
        """Write back in a copy what was written since a version."""
        copy = open_rocksdb(target, options)
        try:
            writer = RowWriter(copy, marker.labelled(None).encode())
            for part in undone:
                with self._using(version) as (_, snapshot):
                    writer.restore(part.keys, snapshot)
            writer.finish(marker.labelled(version.label).encode())
            copy.flush()
        finally:
            copy.close()

    def table_files(self) -> list[Path]:
        """Return the table files of the database; a kill may have left half of another one beside them."""
        with self._write_lock, rocksdb_errors(self.path):
            return [self.path / file["name"].lstrip("/") for file in self._require_open().live_files()]

    def maintain(self) -> bool:
        """Flush where many versions are in memory only; tell whether it was done."""
        with self._write_lock, rocksdb_errors(self.path):
            rdict = self._require_open()
            if self._unflushed_versions < FLUSH_VERSIONS:
                return False
            rdict.flush()
            self._unflushed_versions = self._unflushed_bytes = 0
        return True

    def close(self) -> None:
        """Flush, so that the next opening finds two versions, the oldest among them, and close.

        Raises
        ------
        UnavailableError
            Local storage is full or failing. The database is closed; it holds what was flushed before.
        """
        with self._write_lock, rocksdb_errors(self.path):
            if self._rdict is not None:
                try:
                    self._settle(self._rdict)
                finally:
                    self._shut()

    def abandon(self, failure: HoldfastError | None = None) -> None:
        """Close without writing more; the files hold what RocksDB flushes by itself, as after a kill.

        Parameters
        ----------
        failure : HoldfastError, optional
            Why: whoever else is using the database gets the same error.
        """
        with self._write_lock, rocksdb_errors(self.path):
            # A copy has no frames, which would hold this database.
            self._failure = copy(failure)
            self._shut()

    def _settle(self, rdict: Rdict) -> None:
        """Make the present a version that is held, note beside it what one other has, and flush."""
        held = sorted(self._versions.values(), key=lambda version: version.pointer)
        if not held:
            return
        present = next((v for v in held if v.position == self._log.position), held[0])
        other = held[0] if present is not held[0] else held[-1]
        writer = RowWriter(rdict, self._marker.labelled(None).encode())
        for part in self._log.different_since(present.position):
            writer.restore(part.keys, present.open_snapshot)
        undo = None
        if other is not present:
            undo = other.label
            for part in self._log.different_since(min(other.position, present.position)):
                writer.keep_undo(part.keys, other.open_snapshot)
        writer.finish(self._marker.labelled(present.label, undo).encode())
        rdict.flush()

    def _shut(self) -> None:
        # An open snapshot or iterator would keep the database, and its lock.
        with self._condition:
            rdict, self._rdict = self._rdict, None
            self._condition.wait_for(lambda: not self._readers)
            for version in self._alive:
                version.snapshot = None
            self._versions.clear()
        if rdict is not None:
            rdict.close()

    def _require_open(self) -> Rdict:
        if self._rdict is None:
            if self._failure is not None:
                raise copy(self._failure)
            raise ClosedError("the database was closed: open a new view", path=self.path)
        return self._rdict
