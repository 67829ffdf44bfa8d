"""The `rocksdb` backend: the state of a shard in RocksDB, for state that is larger than memory.

::

    <shard directory, 0700>/
        owner                     locked by the process that has the shard open; holds its number
        databases/<id>/           one RocksDB each: a lineage of versions; see `holdfast.backends.rocksdb.database`
        frozen/17-9f3c…/          files of one version that never change, for an upload: links where they can be
        staging/<id>/             what is being made or taken away
        set-aside/<id>/           databases that were found damaged

A version from nothing, or from complete state, begins a database of its own; one made from a base goes into the
base's database. A database is removed when none of its versions is held.

Notes
-----
* **one owner**: a shard is open in one process; in Spark that is the state server.
* **honest**: every block has a checksum, every end of a scan is checked. A damaged database is set aside.
* **after a disk error** RocksDB refuses writes: the database is closed, and the next call reopens it; then it holds
  what its marker says.
* **durability**: see `holdfast.backends.rocksdb.database`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from holdfast import clock
from holdfast.backends import local_files
from holdfast.backends.base import NO_OPTIONS, Backend, BackendStatistics, Pointer, View
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.local_files import StagedFolder
from holdfast.backends.rocksdb.check import damaged_tables
from holdfast.backends.rocksdb.closed_database import create_database, read_marker
from holdfast.backends.rocksdb.errors import damaged
from holdfast.backends.rocksdb.frozen import FrozenDatabase
from holdfast.backends.rocksdb.marker import Marker, VersionLabel, reading_frozen
from holdfast.backends.rocksdb.options import RocksDBOptions
from holdfast.backends.rocksdb.shard_databases import ShardDatabases, make_private
from holdfast.backends.rocksdb.view import RocksDBView
from holdfast.backends.run import Run
from holdfast.backends.schema import TableSchema
from holdfast.errors import ConflictError, CorruptionError

#: A count of rows that takes so much CPU time is kept for so many times as long: it takes at most 1 % of a core.
LONG_COUNT_NS, KEPT_TIMES = 5_000_000, 100
_FROZEN = ("*.sst", "MANIFEST-*", "CURRENT")


class RocksDBBackend(Backend):
    """See the module, and `holdfast.backends.rocksdb.options` for the options."""

    contract_version: ClassVar[int] = 1
    has_one_owner: ClassVar[bool] = True

    def __init__(
        self,
        directory: Path,
        tables: Mapping[str, TableSchema],
        new_id: Callable[[], str],
        options: Mapping[str, str] = NO_OPTIONS,
        executor_directory: Path | None = None,
    ) -> None:
        super().__init__(directory, tables, new_id, options, executor_directory)
        self._shard = ShardDatabases(directory, self.tables, new_id, RocksDBOptions.of("rocksdb", options))
        self._counts = RowCounts()
        # Table files, by inode and time, whose checksums this process has verified.
        self._checked: set[tuple[int, int]] = set()

    @classmethod
    def parse_options(cls, name: str, options: Mapping[str, str]) -> Mapping[str, Any]:
        return vars(RocksDBOptions.of(name, options))

    @classmethod
    def most_open(cls, options: Mapping[str, str]) -> int:
        return RocksDBOptions.of("rocksdb", options).most_open_shards

    # Versions.

    def view(self, pointer: Pointer) -> RocksDBView:
        with self._shard.lock:
            database = self._shard.find(pointer)
            return RocksDBView(self._shard, database, database.version(pointer))

    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self.require_tables(runs)
        label = VersionLabel(new, properties)
        database = self._shard.find(base) if base is not None else None
        self._shard.require_new(new)
        if base is None or database is None:
            self._build(label, runs.values())
        else:
            with self._shard.closing_if_failed(database):
                database.apply(base, label, runs)

    def load(self, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self.require_tables(runs)
        if pointer not in self.versions():
            with suppress(ConflictError):  # another thread was faster
                self._build(VersionLabel(pointer, properties), runs.values())

    @classmethod
    @contextmanager
    def open_frozen(
        cls, pointer: Pointer, tables: Mapping[str, TableSchema], files: FrozenFiles, new_id: Callable[[], str]
    ) -> Iterator[View]:
        with FrozenDatabase(pointer, tables, files) as view:
            yield view

    def versions(self) -> list[Pointer]:
        return self._shard.pointers()

    def drop(self, pointers: Iterable[Pointer]) -> None:
        going = set(pointers)
        with self._shard.lock:
            for database in list(self._shard.open()):
                database.drop(going)
                self._shard.discard_unused(database)
            for pointer in going:
                self._shard.retire(self._shard.frozen / str(pointer))

    def freeze(self, pointer: Pointer) -> list[Path]:
        """Return immutable local files that together hold the version; opening them needs no others.

        A name alone says nothing: two versions may have different files of one name.

        Raises
        ------
        NotFoundError
            The version is not held here.
        CorruptionError
            The database is damaged: nothing is frozen.
        """
        database, folder = self._shard.find(pointer), self._shard.frozen / str(pointer)
        if not folder.is_dir():
            with self._shard.closing_if_failed(database), self._stage() as staged:
                copy = StagedFolder(staged.path / "database", fsync=False)
                options = self._shard.options(create=False)
                # Files that are links to the database's own need not be uploaded again.
                options.set_disable_auto_compactions(True)
                database.copy(pointer, copy.path, options)
                self._check_copy(copy.path, pointer)
                make_private(copy.path)
                with suppress(ConflictError):  # another thread was faster
                    copy.publish(folder)
        with local_files.reading(folder):
            return sorted(folder.iterdir())

    def thaw(self, pointer: Pointer, folder: Path) -> None:
        with local_files.taken_folder(folder, self._shard.staging, self.new_id(), fsync=True) as staged:
            if pointer in self.versions():
                return
            with local_files.requiring_whole(folder):
                self._adopt(pointer, staged)
            with suppress(ConflictError):  # another thread was faster
                self._shard.add(pointer, staged)

    def _adopt(self, pointer: Pointer, staged: StagedFolder) -> None:
        """Check a frozen version that another process has made, and make its files ours."""
        names = local_files.list_folder(staged.path)
        staged.keep_only({name for name in names if _is_frozen(Path(name))})
        for name in local_files.list_folder(staged.path):
            staged.adopt(name)
        with reading_frozen():
            marker = self._require_marker(staged.path, pointer)
        marker.require(self.tables, staged.path)

    def maintain(self, pointer: Pointer) -> int:
        database = self._shard.find(pointer)
        with self._shard.closing_if_failed(database):
            return int(database.maintain())

    def statistics(self) -> BackendStatistics:
        versions = self.versions()
        rows: dict[str, int] = {}
        if versions:
            with self.view(versions[-1]) as view:
                rows = {table: self._counts.of(table, partial(view.estimate_rows, table)) for table in self.tables}
        return BackendStatistics(
            versions=len(versions),
            local_bytes=local_files.folder_bytes(self._shard.home) + local_files.folder_bytes(self._shard.frozen),
            rows=rows,
            runs=dict.fromkeys(rows, 1),
        )

    # Making databases.

    def _build(self, label: VersionLabel, runs: Iterable[Run]) -> None:
        """Make a database of complete state."""
        self._shard.open()
        with self._stage() as staged:
            create_database(staged.path, self._shard.options(create=True), label, runs)
            self._shard.add(label.pointer, staged)

    def _check_copy(self, path: Path, pointer: Pointer) -> None:
        """Check the files of a copy that were not checked before, and leave only what opening it needs."""
        tables = {file: _identity(file) for file in path.glob("*.sst")}
        with self._stage() as staged:
            broken = damaged_tables([file for file, known in tables.items() if known not in self._checked], staged)
        if broken:
            raise damaged(broken[0], "its checksums do not match")
        self._require_marker(path, pointer)
        self._checked = {known for known in self._checked if known in tables.values()} | set(tables.values())
        with local_files.writing(path):
            for file in path.iterdir():
                if not _is_frozen(file):
                    file.unlink()

    def _require_marker(self, path: Path, pointer: Pointer) -> Marker:
        """Return the marker of a database that nobody has open, if its rows are those of a version, and of no other."""
        marker = read_marker(path, self._shard.options(create=False))
        marker.frozen_as(pointer, path)
        return marker

    def _stage(self) -> AbstractContextManager[StagedFolder]:
        return local_files.staged_folder(self._shard.staging, self.new_id(), fsync=False)

    # Care.

    def verify(self) -> list[Path]:
        """Check all table files, and set the databases aside whose files are damaged; frozen files are made anew.

        Returns
        -------
        list of pathlib.Path
            The damaged files, where they were.
        """
        found: list[Path] = []
        for name in local_files.list_folder(self._shard.frozen):
            self._shard.retire(self._shard.frozen / name)
        databases = None
        while databases is None:
            try:
                databases = list(self._shard.open())
            except CorruptionError as exc:
                found.append(Path(str(exc.facts["file"])))
        for database in databases:
            with self._stage() as staged:
                broken = damaged_tables(database.table_files(), staged)
            found += broken
            if broken and self._shard.abandon(database, damaged(broken[0], "its checksums do not match")):
                self._shard.put_aside(database.path)
        return found

    def remove_leftovers(self, before_ns: int) -> int:
        held = {str(pointer) for pointer in self.versions()}
        frozen = [name for name in local_files.list_folder(self._shard.frozen) if name not in held]
        for name in frozen:
            self._shard.retire(self._shard.frozen / name)
        stale = (local_files.remove_stale_folders(f, before_ns) for f in (self._shard.staging, self._shard.set_aside))
        return len(frozen) + sum(stale)

    def close(self) -> None:
        """Flush and close all databases; views of them are closed too. Closing twice is fine.

        Raises
        ------
        UnavailableError
            The disk failed: what was not on disk before is lost here, and is restored from its commits.
        """
        self._shard.close()


class RowCounts:
    """About how many rows tables have, for metrics: a count that takes long is not made again for a while.

    A few rows are counted, and what was deleted before them is stepped over each time, until RocksDB has compacted it:
    that may be a million rows, and nobody else reads meanwhile.

    Parameters
    ----------
    cpu_ns, monotonic_ns : callable
        See `holdfast.clock`.

    Notes
    -----
    Threads: any.
    """

    def __init__(
        self, cpu_ns: Callable[[], int] = clock.cpu_ns, monotonic_ns: Callable[[], int] = clock.monotonic_ns
    ) -> None:
        self._cpu_ns, self._monotonic_ns = cpu_ns, monotonic_ns
        self._kept: dict[str, tuple[int, int]] = {}

    def of(self, table: str, count: Callable[[], int]) -> int:
        """Return the rows of a table, as `count` does now or has done a moment ago."""
        until_ns, rows = self._kept.get(table, (0, 0))
        if self._monotonic_ns() < until_ns:
            return rows
        began_ns = self._cpu_ns()
        rows = count()
        took_ns = self._cpu_ns() - began_ns
        if took_ns >= LONG_COUNT_NS:
            self._kept[table] = self._monotonic_ns() + KEPT_TIMES * took_ns, rows
        return rows


def _is_frozen(file: Path) -> bool:
    return any(file.match(pattern) for pattern in _FROZEN)


def _identity(file: Path) -> tuple[int, int]:
    with local_files.reading(file):
        found = file.stat()
    return found.st_ino, found.st_mtime_ns
