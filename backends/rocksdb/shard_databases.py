"""The databases of one shard that this process has open: who owns the shard, and what becomes of a database that fails.

The process that has a shard open has locked its file ``owner``. Databases are opened by the first call that needs them,
and again by the next call after their disk failed. One that is damaged is set aside; one that nobody needs is removed.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from weakref import WeakKeyDictionary

from rocksdict import Options

from holdfast.backends import local_files
from holdfast.backends.base import Pointer
from holdfast.backends.local_files import StagedFolder
from holdfast.backends.rocksdb.check import damaged_tables
from holdfast.backends.rocksdb.database import Database
from holdfast.backends.rocksdb.errors import damaged
from holdfast.backends.rocksdb.marker import Marker
from holdfast.backends.rocksdb.options import RocksDBOptions, database_options, process_memory
from holdfast.backends.schema import TableSchema
from holdfast.errors import ClosedError, ConflictError, CorruptionError, HoldfastError, NotFoundError, UnavailableError


class ShardDatabases:
    """See the module. Safe for threads.

    Parameters
    ----------
    directory : pathlib.Path
        The shard's; `holdfast.backends.rocksdb.backend` shows it.
    tables : mapping of str to TableSchema
        The shard's tables.
    new_id : callable
        Returns a new unique name each time.
    options : RocksDBOptions

    Attributes
    ----------
    opened : list of Database
    lock : threading.RLock
        Of that list; taken before a database's own locks.
    memory : ProcessMemory
    home, frozen, staging, set_aside : pathlib.Path
        Folders of the shard.
    """

    def __init__(
        self, directory: Path, tables: Mapping[str, TableSchema], new_id: Callable[[], str], options: RocksDBOptions
    ) -> None:
        self._directory = directory
        self.tables = tables
        self.new_id = new_id
        self._options = options
        self.memory = process_memory(options)
        self._process = os.getpid()
        self.lock = threading.RLock()
        self._owner: IO[str] | None = None
        self._is_closed = False
        self.opened: list[Database] = []
        self._unopened: list[Path] = []
        self._readable: WeakKeyDictionary[Database, Marker] = WeakKeyDictionary()
        folders = ("databases", "frozen", "staging", "set-aside")
        self.home, self.frozen, self.staging, self.set_aside = (directory / n for n in folders)
        for folder in (self.home, self.frozen, self.staging, self.set_aside):
            with local_files.writing(folder):
                local_files.make_private_folder(folder)

    def options(self, *, create: bool) -> Options:
        """Return the options with which a database of the shard is opened, or made."""
        return database_options(self._options, self.memory, self, create=create)

    def retire(self, folder: Path) -> None:
        """Take a folder of the shard away."""
        local_files.retire_folder(folder, self.staging, self.new_id())

    def pointers(self) -> list[Pointer]:
        """Return the versions held, oldest first."""
        with self.lock:
            return sorted({pointer for database in self.open() for pointer in database.pointers})

    def find(self, pointer: Pointer) -> Database:
        """Return the open database that holds a version.

        Raises
        ------
        NotFoundError
            None does.
        SchemaMismatchError
            It holds other tables than the shard's.
        """
        with self.lock:
            for database in self.open():
                if pointer in database.pointers:
                    self._require_readable(database)
                    return database
        raise NotFoundError("no such version; choose one that is held, or restore it", pointer=pointer)

    def _require_readable(self, database: Database) -> None:
        """Check the tables of a database, once: each read and each write asks, and schemas may be many."""
        marker = database.marker
        if self._readable.get(database) is not marker:
            marker.require(self.tables, database.path)
            self._readable[database] = marker

    def require_new(self, pointer: Pointer) -> None:
        """Raise ConflictError where a version is held."""
        if pointer in self.pointers():
            raise ConflictError("the version exists already", pointer=pointer)

    def add(self, pointer: Pointer, staged: StagedFolder) -> None:
        """Make a staged database of a new version one of the shard's, and open it.

        Raises
        ------
        ConflictError
            The version is held already.
        """
        make_private(staged.path)
        with self.lock:
            self.require_new(pointer)
            target = self.home / self.new_id()
            staged.publish(target)
            self._unopened.append(target)
            self.open()

    def open(self) -> list[Database]:
        """Return the open databases, having opened those that are not."""
        if os.getpid() != self._process:
            raise ClosedError("a RocksDB backend cannot be used after a fork: make one in the new process")
        with self.lock:
            if self._is_closed:
                raise ClosedError("the backend was closed: make another", directory=self._directory)
            if self._owner is None:
                self._owner = self._own()
                self._unopened = [self.home / name for name in local_files.list_folder(self.home)]
                # Checked when a former process froze them: they may have been damaged since.
                for name in local_files.list_folder(self.frozen):
                    self.retire(self.frozen / name)
            while self._unopened:
                self._open_one(self._unopened[-1])
                self._unopened.pop()
            return self.opened

    def _open_one(self, path: Path) -> None:
        if not path.is_dir():  # somebody has removed it since it was closed after an error
            return
        try:
            options = self.options(create=False)
            self.opened.append(Database(path, options, lambda: self.memory.write_buffer_bytes))
        except NotFoundError:  # an unfinished version, and nothing else
            self.put_aside(path)
        except CorruptionError as exc:
            try:
                raise self._naming_the_file(exc, path) from exc
            finally:
                self.put_aside(path)
                self._unopened.remove(path)

    def _own(self) -> IO[str]:
        """Lock the shard for this process; the lock goes with the process."""
        path = self._directory / "owner"
        with local_files.writing(path):
            file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")  # noqa: SIM115
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = file.read().strip() or "of unknown number"
                file.close()
                raise UnavailableError(
                    f"another process has the shard at {self._directory} open: stop process {owner}, or wait for it "
                    "to end"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        self.memory.admit(self)
        return file

    @contextmanager
    def closing_if_failed(self, database: Database) -> Iterator[None]:
        """Close a database that turns out to be damaged, or whose disk fails; the error goes on."""
        try:
            yield
        except CorruptionError as exc:
            if not self.abandon(database, exc):
                raise
            # Not by a variable: it would hold the frames that hold it, and with them the database's lock.
            try:
                raise self._naming_the_file(exc, database.path) from exc
            finally:
                self.put_aside(database.path)
        except UnavailableError as exc:
            if self.abandon(database, exc):
                with self.lock:
                    self._unopened.append(database.path)
            raise

    def abandon(self, database: Database, failure: HoldfastError | None = None) -> bool:
        """Close a database as it is; tell whether this thread was the first to do so.

        Parameters
        ----------
        failure : HoldfastError, optional
            What views of it raise from now on, which other threads may be reading: they have lost their version, too.
        """
        with self.lock:
            if database not in self.opened:
                return False
            self.opened.remove(database)
            with suppress(HoldfastError):  # the first error counts
                database.abandon(failure)
            return True

    def _naming_the_file(self, error: CorruptionError, path: Path) -> CorruptionError:
        """Return the error of a damaged database that nobody has open; its fact `file` is the damaged one.

        RocksDB does not name every table file that it cannot read, so they are all read where it names none.
        """
        file = Path(str(error.facts.get("file", path)))
        if file.suffix != ".sst":
            with suppress(UnavailableError), local_files.staged_folder(self.staging, self.new_id(), fsync=False) as s:
                file = next(iter(damaged_tables(path.glob("*.sst"), s)), file)
        return damaged(file, str(error.facts.get("cause", error)))

    def put_aside(self, path: Path) -> None:
        """Move a damaged database out of the way: its versions are not here any more."""
        with local_files.writing(path), suppress(FileNotFoundError):
            local_files.make_private_folder(self.set_aside)
            os.rename(path, self.set_aside / path.name)
            os.utime(self.set_aside / path.name)

    def discard_unused(self, database: Database) -> None:
        """Remove a database of which no version is held or viewed."""
        if os.getpid() != self._process:
            return
        with self.lock:
            if database not in self.opened or database.trim():
                return
            # Who has found it just now wants one of its versions.
            if self.abandon(database, NotFoundError("no such version: it was dropped meanwhile")):
                self.retire(database.path)

    def close(self) -> None:
        """Flush and close all databases; views of them are closed too. Closing twice is fine.

        Raises
        ------
        UnavailableError
            The disk failed: what was not on disk before is lost here, and is restored from its commits.
        """
        if os.getpid() != self._process:  # they are the parent's
            return
        with self.lock:
            self._is_closed = True
            databases, self.opened = self.opened, []
            try:
                self._close_all(databases)
            finally:
                self.memory.release(self)
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
                self.put_aside(database.path)
            else:
                if is_held:
                    make_private(database.path)
                else:
                    self.retire(database.path)
        if failures:
            raise failures[0]


def make_private(folder: Path) -> None:
    """Keep other users from a database; RocksDB makes files as the process's mask says."""
    with local_files.writing(folder):
        folder.chmod(0o700)
        for file in folder.iterdir():
            with suppress(FileNotFoundError):  # a compaction was faster
                file.chmod(0o600)
