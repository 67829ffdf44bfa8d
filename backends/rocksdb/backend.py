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
* **after an error of the disk** RocksDB refuses writes: the database is closed, and opened again by the next call;
  then it holds what its marker says.
* **durability**: see `holdfast.backends.rocksdb.database`.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar

from holdfast.backends import local_files
from holdfast.backends.base import NO_OPTIONS, Backend, BackendStatistics, Pointer
from holdfast.backends.local_files import StagedFolder
from holdfast.backends.rocksdb.check import damaged_tables
from holdfast.backends.rocksdb.database import Database, create_database, read_marker
from holdfast.backends.rocksdb.errors import damaged
from holdfast.backends.rocksdb.marker import Marker, Named
from holdfast.backends.rocksdb.options import RocksDBOptions, database_options, process_memory
from holdfast.backends.rocksdb.view import RocksDBView
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import (
    ClosedError,
    ConflictError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)

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
        self._parsed = RocksDBOptions.of("rocksdb", options)
        self._memory = process_memory(self._parsed)
        self._process = os.getpid()
        # Of the lists below; taken before a database's own locks.
        self._lock = threading.RLock()
        self._owner: IO[str] | None = None
        self._is_closed = False
        self._databases: list[Database] = []
        self._unopened: list[Path] = []
        self._checked: set[tuple[int, int]] = set()
        folders = ("databases", "frozen", "staging", "set-aside")
        self._home, self._frozen, self._staging, self._set_aside = (directory / n for n in folders)
        for folder in (self._home, self._frozen, self._staging, self._set_aside):
            with local_files.writing(folder):
                local_files.make_private_folder(folder)

    @classmethod
    def parse_options(cls, name: str, options: Mapping[str, str]) -> Mapping[str, Any]:
        return vars(RocksDBOptions.of(name, options))

    @classmethod
    def most_open(cls, options: Mapping[str, str]) -> int:
        return RocksDBOptions.of("rocksdb", options).most_open_shards

    # Versions.

    def view(self, pointer: Pointer) -> RocksDBView:
        with self._lock:
            database = self._find(pointer)
            return RocksDBView(self, database, database.version(pointer))

    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self.require_tables(runs)
        named = Named(new, properties)
        database = self._find(base) if base is not None else None
        self._require_new(new)
        if base is None or database is None:
            self._build(named, runs.values())
        else:
            with self.judging(database):
                database.apply(base, named, runs)

    def load(self, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        self.require_tables(runs)
        if pointer not in self.versions():
            with suppress(ConflictError):  # another thread was faster
                self._build(Named(pointer, properties), runs.values())

    def versions(self) -> list[Pointer]:
        with self._lock:
            return sorted({pointer for database in self._open() for pointer in database.pointers})

    def drop(self, pointers: Iterable[Pointer]) -> None:
        going = set(pointers)
        with self._lock:
            for database in list(self._open()):
                database.drop(going)
                self.discard_unused(database)
            for pointer in going:
                local_files.retire_folder(self._frozen / str(pointer), self._staging, self.new_id())

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
        database, folder = self._find(pointer), self._frozen / str(pointer)
        if not folder.is_dir():
            with self.judging(database), self._stage() as staged:
                copy = StagedFolder(staged.path / "database", fsync=False)
                options = database_options(self._parsed, self._memory, self, create=False)
                # Files that are links to the database's own need not be uploaded again.
                options.set_disable_auto_compactions(True)
                database.copy(pointer, copy.path, options)
                self._check_copy(copy.path, pointer)
                _make_private(copy.path)
                with suppress(ConflictError):  # another thread was faster
                    copy.publish(folder)
        with local_files.reading(folder):
            return sorted(folder.iterdir())

    def thaw(self, pointer: Pointer, folder: Path) -> None:
        with local_files.taken_folder(folder, self._staging, self.new_id(), fsync=True) as staged:
            if pointer in self.versions():
                return
            with local_files.requiring_whole(folder):
                self._adopt(pointer, staged)
            with suppress(ConflictError):  # another thread was faster
                self._put_in_place(pointer, staged)

    def _adopt(self, pointer: Pointer, staged: StagedFolder) -> None:
        """Check a frozen version that another process has made, and make its files ours."""
        names = local_files.list_folder(staged.path)
        staged.keep_only({name for name in names if _is_frozen(Path(name))})
        for name in local_files.list_folder(staged.path):
            staged.adopt(name)
        self._require_marker(staged.path, pointer).require(self.tables, staged.path)

    def maintain(self, pointer: Pointer) -> int:
        database = self._find(pointer)
        with self.judging(database):
            return int(database.maintain())

    def statistics(self) -> BackendStatistics:
        versions = self.versions()
        rows: dict[str, int] = {}
        if versions:
            with self.view(versions[-1]) as view:
                rows = {table: view.estimate_rows(table) for table in self.tables}
        return BackendStatistics(
            versions=len(versions),
            local_bytes=local_files.folder_bytes(self._home) + local_files.folder_bytes(self._frozen),
            rows=rows,
            runs=dict.fromkeys(rows, 1),
        )

    # Making databases.

    def _build(self, named: Named, runs: Iterable[Run]) -> None:
        """Make a database of complete state."""
        self._open()
        with self._stage() as staged:
            create_database(staged.path, database_options(self._parsed, self._memory, self, create=True), named, runs)
            self._put_in_place(named.pointer, staged)

    def _put_in_place(self, pointer: Pointer, staged: StagedFolder) -> None:
        """Make a staged database one of the shard's, and open it."""
        _make_private(staged.path)
        with self._lock:
            self._require_new(pointer)
            target = self._home / self.new_id()
            staged.publish(target)
            self._unopened.append(target)
            self._open()

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
        """Return the marker of a database that nobody has open, if its rows are those of a version."""
        marker = read_marker(path, database_options(self._parsed, self._memory, self, create=False))
        if marker.version is None or marker.version.pointer != pointer:
            raise damaged(path, "its marker names another version")
        return marker

    def _stage(self) -> AbstractContextManager[StagedFolder]:
        return local_files.staged_folder(self._staging, self.new_id(), fsync=False)

    # Finding, closing and setting aside databases.

    def _find(self, pointer: Pointer) -> Database:
        with self._lock:
            for database in self._open():
                if pointer in database.pointers:
                    database.marker.require(self.tables, database.path)
                    return database
        raise NotFoundError("no such version; choose one that is held, or restore it", pointer=pointer)

    def _require_new(self, pointer: Pointer) -> None:
        if pointer in self.versions():
            raise ConflictError("the version exists already", pointer=pointer)

    def _open(self) -> list[Database]:
        """Return the open databases, having opened those that are not."""
        if os.getpid() != self._process:
            raise ClosedError("a RocksDB backend cannot be used after a fork: make one in the new process")
        with self._lock:
            if self._is_closed:
                raise ClosedError("the backend was closed: make another", directory=self.directory)
            if self._owner is None:
                self._owner = self._own()
                self._unopened = [self._home / name for name in local_files.list_folder(self._home)]
                # Checked when a former process froze them: they may have been damaged since.
                for name in local_files.list_folder(self._frozen):
                    local_files.retire_folder(self._frozen / name, self._staging, self.new_id())
            while self._unopened:
                self._open_one(self._unopened[-1])
                self._unopened.pop()
            return self._databases

    def _open_one(self, path: Path) -> None:
        if not path.is_dir():  # somebody has removed it since it was closed after an error
            return
        try:
            options = database_options(self._parsed, self._memory, self, create=False)
            self._databases.append(Database(path, options, lambda: self._memory.write_buffer_bytes))
        except NotFoundError:  # an unfinished version, and nothing else
            self._put_aside(path)
        except CorruptionError:
            self._put_aside(path)
            self._unopened.remove(path)
            raise

    def _own(self) -> IO[str]:
        """Lock the shard for this process; the lock goes with the process."""
        path = self.directory / "owner"
        with local_files.writing(path):
            file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")  # noqa: SIM115
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = file.read().strip() or "of unknown number"
                file.close()
                raise UnavailableError(
                    f"another process has the shard at {self.directory} open: stop process {owner}, or wait until "
                    "it has ended"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        self._memory.admit(self)
        return file

    @contextmanager
    def judging(self, database: Database) -> Iterator[None]:
        """Close a database that turns out to be damaged, or whose disk fails; the error goes on."""
        try:
            yield
        except CorruptionError:
            if self._abandon(database):
                self._put_aside(database.path)
            raise
        except UnavailableError:
            if self._abandon(database):
                with self._lock:
                    self._unopened.append(database.path)
            raise

    def _abandon(self, database: Database) -> bool:
        """Close a database as it is; tell whether this thread was the first to do so."""
        with self._lock:
            if database not in self._databases:
                return False
            self._databases.remove(database)
            with suppress(HoldfastError):  # the first error counts
                database.abandon()
            return True

    def _put_aside(self, path: Path) -> None:
        with local_files.writing(path), suppress(FileNotFoundError):
            local_files.make_private_folder(self._set_aside)
            os.rename(path, self._set_aside / path.name)
            os.utime(self._set_aside / path.name)

    def discard_unused(self, database: Database) -> None:
        """Remove a database of which no version is held or viewed."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if database in self._databases and not database.trim() and self._abandon(database):
                local_files.retire_folder(database.path, self._staging, self.new_id())

    # Care.

    def verify(self) -> list[Path]:
        """Check all table files, and set the databases aside whose files are damaged; frozen files are made anew.

        Returns
        -------
        list of pathlib.Path
            The damaged files, where they were.
        """
        found: list[Path] = []
        for name in local_files.list_folder(self._frozen):
            local_files.retire_folder(self._frozen / name, self._staging, self.new_id())
        databases = None
        while databases is None:
            try:
                databases = list(self._open())
            except CorruptionError as exc:
                found.append(Path(str(exc).split(" is damaged", 1)[0]))
        for database in databases:
            with self._stage() as staged:
                broken = damaged_tables(database.table_files(), staged)
            found += broken
            if broken and self._abandon(database):
                self._put_aside(database.path)
        return found

    def remove_leftovers(self, before_ns: int) -> int:
        held = {str(pointer) for pointer in self.versions()}
        frozen = [name for name in local_files.list_folder(self._frozen) if name not in held]
        for name in frozen:
            local_files.retire_folder(self._frozen / name, self._staging, self.new_id())
        stale = (local_files.remove_stale_folders(f, before_ns) for f in (self._staging, self._set_aside))
        return len(frozen) + sum(stale)

    def close(self) -> None:
        """Flush and close all databases; views of them are closed too. Closing twice is fine.

        Raises
        ------
        UnavailableError
            The disk failed: what was not on disk before is lost here, and is restored from its commits.
        """
        if os.getpid() != self._process:  # they are the parent's
            return
        with self._lock:
            self._is_closed = True
            databases, self._databases = self._databases, []
            try:
                self._close_all(databases)
            finally:
                self._memory.release(self)
                if self._owner is not None:
                    self._owner.close()
                    self._owner = None

    def _close_all(self, databases: list[Database]) -> None:
        failures: list[HoldfastError] = []
        for database in databases:
            is_held = bool(database.pointers)
            try:
                database.close()
            except UnavailableError as exc:
                failures.append(exc)
            except CorruptionError:
                self._put_aside(database.path)
            else:
                if is_held:
                    _make_private(database.path)
                else:
                    local_files.retire_folder(database.path, self._staging, self.new_id())
        if failures:
            raise failures[0]


def _make_private(folder: Path) -> None:
    """Keep other users from a database; RocksDB makes files as the process's mask says."""
    with local_files.writing(folder):
        folder.chmod(0o700)
        for file in folder.iterdir():
            with suppress(FileNotFoundError):  # a compaction was faster
                file.chmod(0o600)


def _is_frozen(file: Path) -> bool:
    return any(file.match(pattern) for pattern in _FROZEN)


def _identity(file: Path) -> tuple[int, int]:
    with local_files.reading(file):
        found = file.stat()
    return found.st_ino, found.st_mtime_ns
