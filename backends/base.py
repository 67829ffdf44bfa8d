"""The backend seam: where one shard's working state lives.

A backend keeps **versions** of one shard's tables. A version has a `Pointer` and never changes; the next one is made
from it and from what one micro-batch wrote::

    with MyBackend(directory, {"counts": schema}, new_id) as backend:
        base, new = Pointer(17, "9f3c"), Pointer(18, "b21e")
        with backend.view(base) as view:
            found = view.get("counts", keys)  # found.exists, found.values: row i for key i
        backend.apply(base, new, {"counts": Run.build(schema, keys, values)}, {})

Two attempts at one micro-batch make two versions side by side, and neither sees the other::

    17-9f3c ──▶ 18-b21e        the attempt that Spark kept
           └──▶ 18-04aa        an attempt that Spark dropped: garbage, dropped later

What a backend promises
-----------------------
* **atomic**: `apply`, `load` and `thaw` make a version whole or not at all, also when the process is killed.
* **immutable**: a view always gives the same answers, whatever is applied or dropped meanwhile.
* **honest**: a version that is not here is a `NotFoundError`, never an empty state. One whose files are damaged is a
  `CorruptionError` that names the file, and is set aside, so that the next attempt restores it.
* **concurrent**: any number of views; calls from several threads and processes need no lock.

What one implements
-------------------
::

    Backend    must: versions, view                    which there are, and reading one
                     apply, load, drop                 making one from another, or from all its rows; forgetting it
                     freeze, thaw                      turning one into files, for snapshots, and back
                     statistics, close
               may:  parse_options, properties, open_frozen, maintain, verify, remove_leftovers
    View       must: properties, get, scan, close
               may:  scan_prefix

It promises no durability: commits are made durable elsewhere before their pointer is used. `holdfast.mvcc` chooses
pointers, keeps transactions and drops old versions. A plug-in subclasses `Backend` and `View`, registers under the
entry point group ``holdfast.backends``, and proves itself with `holdfast.testing.BackendContract`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import BoolArray
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.options import parse_options
from holdfast.backends.run import Run
from holdfast.backends.schema import Keys, TableSchema, find_table
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError

#: Version of this seam. A backend states the one it was built for; others are refused.
CONTRACT_VERSION = 2
NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
MAX_HASH = int(np.iinfo(np.uint64).max)
_POINTER = re.compile(r"(0|[1-9][0-9]{0,18})-([0-9A-Za-z]{1,64})")


class Pointer(NamedTuple):
    """What a query remembers of a shard: which version, made by which commit.

    Attributes
    ----------
    version : int
        Micro-batch b reads version b and commits version b + 1.
    commit_id : str
        Random; tells attempts at one version apart.
    """

    version: int
    commit_id: str

    def __str__(self) -> str:
        return f"{self.version}-{self.commit_id}"

    @classmethod
    def parse(cls, text: object) -> Pointer:
        """Return the pointer that `str` wrote.

        Raises
        ------
        InvalidArgumentError
            `text` is not ``<version>-<commit id>``.
        """
        found = _POINTER.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise InvalidArgumentError(f"not a pointer: {ascii(text)[:80]}")
        return cls(int(found[1]), found[2])


class Found(NamedTuple):
    """The answer to a look-up of n keys.

    Attributes
    ----------
    exists : numpy.ndarray of bool, shape (n,)
        Whether the key has state. A null value is state.
    values : pyarrow.RecordBatch, shape (n, value columns)
        Row i for key i; all null where the key is absent.
    """

    exists: BoolArray
    values: pa.RecordBatch


@dataclass(frozen=True)
class BackendStatistics:
    """What a shard occupies locally.

    Attributes
    ----------
    versions : int
        Versions held.
    local_bytes : int
        All files of the shard.
    rows : mapping of str to int
        Rows of the newest version by table; keys in several runs count several times.
    runs : mapping of str to int
        Runs of the newest version by table; anything else, such as a database, counts as one.
    """

    versions: int
    local_bytes: int
    rows: Mapping[str, int] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)


class View(ABC):
    """One version, read-only and immutable; safe for many threads until it is closed."""

    @property
    @abstractmethod
    def properties(self) -> Mapping[str, Any]:
        """The JSON values that `Backend.apply` or `Backend.load` got for this version, on any machine."""

    @abstractmethod
    def get(self, table: str, keys: Keys) -> Found:
        """Return the values of `keys`, which may come in any order and repeat.

        Raises
        ------
        ClosedError
            The view was closed.
        """

    @abstractmethod
    def scan(self, table: str, first_hash: int = 0, last_hash: int = MAX_HASH) -> Iterator[Run]:
        """Yield the live rows whose hash lies in [first_hash, last_hash], ascending by it, in any number of runs.

        Notes
        -----
        Cost: the first runs are small, so that the first rows cost little whatever the table holds, even if many rows
        share the first hash: these may come in several runs, in any order. An unfinished scan frees its resources when
        its iterator is closed or garbage collected.
        """

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        """Yield the live rows that begin with one of `prefixes`, ascending by hash, in any number of runs.

        Parameters
        ----------
        prefixes : Keys
            Hashes, and the first key columns of the table; see `TableSchema.prefix`. Any order, duplicates allowed.
            Rows of one prefix share its hash: entries of a map, elements of a list. Very many may come in several runs,
            in any order.

        Notes
        -----
        For state with several rows a key, as `transformWithState` has in its lists and maps.
        """
        if len(prefixes):
            for run in self.scan(table, int(prefixes.hashes.min()), int(prefixes.hashes.max())):
                found = run.with_prefixes(prefixes)
                if len(found):
                    yield found

    @abstractmethod
    def close(self) -> None:
        """Release the view's resources. Closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Backend(ABC):
    """The working state of one shard; see the module for what it promises.

    Parameters
    ----------
    directory : pathlib.Path
        The shard's own local directory; made, private to the user, when it is missing.
    tables : mapping of str to TableSchema
        The shard's tables.
    new_id : callable
        Returns a new unique name each time.
    options : mapping of str to str
        What Spark's configuration has below ``spark.holdfast.<backend>.``; see `parse_options`.
    executor_directory : pathlib.Path, optional
        Holds the directories of all shards of this executor; by default the shard is alone.
    """

    #: The `CONTRACT_VERSION` that the class was built for; every concrete class states it.
    contract_version: ClassVar[int]
    #: Whether the files live on a RAM file system and vanish with the executor.
    in_memory: ClassVar[bool] = False

    def __init__(
        self,
        directory: Path,
        tables: Mapping[str, TableSchema],
        new_id: Callable[[], str],
        options: Mapping[str, str] = NO_OPTIONS,
        executor_directory: Path | None = None,
    ) -> None:
        self.directory = directory
        self.tables = dict(tables)
        self.new_id = new_id
        self.options = dict(options)
        self.executor_directory = executor_directory or directory

    @classmethod
    def parse_options(cls, name: str, options: Mapping[str, str]) -> Mapping[str, Any]:
        """Check options and return their values; called on the driver, before a query starts.

        Parameters
        ----------
        name : str
            The name under which the backend is registered, for errors.

        Raises
        ------
        InvalidArgumentError
            An option is not known, or its value does not fit.
        """
        return parse_options(name, {}, options)

    def require_tables(self, runs: Mapping[str, Run]) -> None:
        """Check that all of `runs`, as for `apply` and `load`, belong to the shard's tables.

        Raises
        ------
        NotFoundError
            One is not.
        """
        for table in runs:
            find_table(self.tables, table)

    @abstractmethod
    def view(self, pointer: Pointer) -> View:
        """Return a view of a version.

        Raises
        ------
        NotFoundError
            The version is not held here.
        """

    def properties(self, pointer: Pointer) -> Mapping[str, Any]:
        """Return a version's properties without opening its rows. Raises the errors of `view`."""
        with self.view(pointer) as view:
            return view.properties

    def is_whole(self, pointer: Pointer) -> bool:
        """Tell whether a version is held here and can be opened."""
        try:
            self.view(pointer).close()
        except (NotFoundError, CorruptionError):
            return False
        return True

    @abstractmethod
    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        """Make version `new` from version `base` (None: empty) and what was written since.

        Parameters
        ----------
        runs : mapping of str to Run
            By table: one run of writes and deletes.
        properties : mapping
            JSON values to keep with the version.

        Raises
        ------
        NotFoundError
            `base` is not held here, or a table is not the shard's.
        ConflictError
            `new` exists already.
        UnavailableError
            Local storage is full or failing. Nothing was made.
        """

    @abstractmethod
    def load(self, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        """Make version `pointer` from complete state; doing it twice does no harm.

        A version that has lost files is replaced.
        """

    @abstractmethod
    def freeze(self, pointer: Pointer) -> list[Path]:
        """Return immutable local files that together hold the version, for `thaw` here or on another machine.

        Returns
        -------
        list of pathlib.Path
            Their names differ. They go when the version is dropped: a caller that needs them longer links them
            immediately, and its links stay valid.

        Raises
        ------
        NotFoundError
            The version is not held here.
        CorruptionError
            A file of it is damaged; the version is set aside.
        """

    @abstractmethod
    def thaw(self, pointer: Pointer, folder: Path) -> None:
        """Take over a folder as version `pointer`; doing it twice, or side by side, does no harm.

        A version that has lost files is replaced. The version has the properties that it was made with.

        Parameters
        ----------
        folder : pathlib.Path
            Holds copies of the files that `freeze` returned for this version, under their names; on the file system
            of `directory`, and used by nobody else. From now on it is the backend's: it is moved, or removed if the
            version is already here or the folder cannot be used.

        Raises
        ------
        CorruptionError
            The files are not those of this version: one is missing, cut or of another version. Nothing was made.
        SchemaMismatchError
            They hold tables that are not declared, or with other columns. Nothing was made.
        UnavailableError
            Local storage is full or failing, or the folder cannot be moved and was left. Nothing was made.

        Notes
        -----
        Copies are expected to be exact: damage inside a file of the right size may be found only when it is read.
        """

    @classmethod
    @contextmanager
    def open_frozen(
        cls, pointer: Pointer, tables: Mapping[str, TableSchema], files: FrozenFiles, new_id: Callable[[], str]
    ) -> Iterator[View]:
        """Open a frozen version for a few reads during the context; nothing is taken over.

        Parameters
        ----------
        tables : mapping of str to TableSchema
            The shard's tables.
        files : FrozenFiles
            What `freeze` returned for this version, fetched as it is read; `thaw` would need all of it.

        Raises
        ------
        CorruptionError, SchemaMismatchError, UnavailableError
            As of `thaw`; reading raises them, too.
        """
        for name in files.sizes:
            files.require(name)
        with cls(files.folder.parent / f"{files.folder.name}-thawed", tables, new_id) as backend:
            backend.thaw(pointer, files.folder)
            with backend.view(pointer) as view:
                yield view

    @abstractmethod
    def versions(self) -> list[Pointer]:
        """Return the versions held, oldest first."""

    @abstractmethod
    def drop(self, pointers: Iterable[Pointer]) -> None:
        """Drop versions and free what only they used; unknown ones are fine. Open views stay valid."""

    @abstractmethod
    def statistics(self) -> BackendStatistics:
        """Return the local statistics."""

    @abstractmethod
    def close(self) -> None:
        """Release the backend's resources. Closing twice is fine."""

    def maintain(self, pointer: Pointer) -> int:
        """Do postponed work on a version, such as large merges, in the background.

        Returns
        -------
        int
            How many such jobs were done; 0 when there was none.

        Raises
        ------
        NotFoundError
            The version is not held here.
        """
        if pointer not in self.versions():
            raise NotFoundError("no such version here; it may have been dropped", version=str(pointer))
        return 0

    def verify(self) -> list[Path]:
        """Check local files that a former process left, and set aside the versions that are damaged.

        Returns
        -------
        list of pathlib.Path
            The damaged files; empty where all is well, or where each read is checked anyway.
        """
        return []

    def remove_leftovers(self, before_ns: int) -> int:
        """Delete local files last written before `before_ns` that nothing needs, in the background.

        Returns
        -------
        int
            Files deleted; 0 for a backend that leaves none.
        """
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
