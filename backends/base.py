"""The backend seam: the interface of what keeps a shard's working state.

A backend keeps **versions** of one shard's tables. A version has a `Pointer` and never changes; a micro-batch's writes
are applied to it to make the next version::

    with MyBackend(directory, {"counts": schema}, new_id) as backend:
        base, new = Pointer(17, "9f3c"), Pointer(18, "b21e")
        with backend.view(base) as view:
            found = view.get("counts", keys)  # found.exists, found.values: row i for key i
        backend.apply(base, new, {"counts": Run.build(schema, keys, values)}, {})

Two attempts at the same micro-batch make two versions that do not see each other::

    17-9f3c ──▶ 18-b21e        the attempt that Spark kept
           └──▶ 18-04aa        an attempt that Spark discarded: garbage, dropped later

What a backend promises
-----------------------
* **atomic**: `apply`, `load` and `thaw` create a whole version or none, even if the process is killed.
* **immutable**: a view's answers never change, whatever is applied or dropped while it is open.
* **honest**: a missing version raises `NotFoundError` and never reads as empty state. A version with damaged files
  raises a `CorruptionError` that names the file, and is set aside so that the next attempt restores it.
* **concurrent**: any number of views may be open, and threads and processes may call without a lock.

What to implement
-----------------
::

    Backend    must: versions, view                    list the versions; read a version
                     apply, load, drop                 make a version from its base, or from all its rows; drop it
                     freeze, thaw                      export a version as files, for snapshots; import it
                     statistics, close
               may:  parse_options, properties, open_frozen, maintain, verify, remove_leftovers
    View       must: properties, get, scan, close
               may:  scan_prefix, crowded

A backend promises no durability: the commit log stores commits before their pointer is used. `holdfast.mvcc` chooses
pointers, runs transactions and drops old versions. A plug-in subclasses `Backend` and `View`, registers under the
entry point group ``holdfast.backends``, and must pass `holdfast.testing.BackendContract`.
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

from holdfast.backends.arrow.rows import BoolArray, HashArray
from holdfast.backends.frozen_files import FrozenFiles
from holdfast.backends.options import parse_options
from holdfast.backends.run import Run
from holdfast.backends.schema import Keys, TableSchema, find_table
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError

#: Version of this interface. A backend declares the version it was built for; any other is refused.
CONTRACT_VERSION = 2
NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
MAX_HASH = int(np.iinfo(np.uint64).max)
_POINTER = re.compile(r"(0|[1-9][0-9]{0,18})-([0-9A-Za-z]{1,64})")


class Pointer(NamedTuple):
    """Identifies one version of a shard and the commit that made it.

    Attributes
    ----------
    version : int
        Micro-batch b reads the newest version ≤ b and commits version b + 1 if it writes; so versions are sparse.
    commit_id : str
        Random; distinguishes attempts at the same version.
    """

    version: int
    commit_id: str

    def __str__(self) -> str:
        return f"{self.version}-{self.commit_id}"

    @classmethod
    def parse(cls, text: object) -> Pointer:
        """Parse the text that `str` returns for a pointer.

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
    """The result of looking up n keys.

    Attributes
    ----------
    exists : numpy.ndarray of bool, shape (n,)
        Whether the key has state; a null value counts as state.
    values : pyarrow.RecordBatch, shape (n, value columns)
        Row i for key i; all null where the key is absent.
    """

    exists: BoolArray
    values: pa.RecordBatch


@dataclass(frozen=True)
class BackendStatistics:
    """A shard's use of local storage.

    Attributes
    ----------
    versions : int
        Versions held.
    local_bytes : int
        Size of all the shard's files.
    rows : mapping of str to int
        Rows of the newest version, by table; a key in several runs counts several times.
    runs : mapping of str to int
        Runs of the newest version, by table; other storage, such as a database, counts as one run.
    """

    versions: int
    local_bytes: int
    rows: Mapping[str, int] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)


class View(ABC):
    """A read-only view of one version; many threads may use it until it is closed."""

    @property
    @abstractmethod
    def properties(self) -> Mapping[str, Any]:
        """The JSON values passed to `Backend.apply` or `Backend.load` when this version was made, on any machine."""

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
        """Yield the live rows with hashes in [first_hash, last_hash], in hash order, in any number of runs.

        Notes
        -----
        Cost: the first runs are small, so the first rows are cheap however large the table is. Rows that share a hash
        may span several runs, in any order. An unfinished scan frees its resources when its iterator is closed or
        garbage collected.
        """

    def scan_prefix(self, table: str, prefixes: Keys) -> Iterator[Run]:
        """Yield the live rows whose keys begin with one of `prefixes`, in hash order, in any number of runs.

        Parameters
        ----------
        prefixes : Keys
            Hashes, and the first key columns of the table; see `TableSchema.prefix`. Any order, duplicates allowed.
            All rows of a prefix share its hash, such as a map's entries or a list's elements; they may span several
            runs, in any order. `KeyRanges` restrict the rows to a range of the next key column.

        Notes
        -----
        For state with several rows per key, such as the lists and maps of `transformWithState`. A view may ignore
        ranges and yield all rows of a prefix, since callers check each row; keys with millions of rows are then slow.
        """
        if len(prefixes):
            for run in self.scan(table, int(prefixes.hashes.min()), int(prefixes.hashes.max())):
                found = run.with_prefixes(prefixes)
                if len(found):
                    yield found

    def crowded(self, _table: str) -> HashArray:
        """Return some hashes that very many rows share: a hint to pass `KeyRanges`, which the view must then use."""
        return np.empty(0, np.uint64)

    @abstractmethod
    def close(self) -> None:
        """Release the view's resources. Closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Backend(ABC):
    """The working state of one shard; the module docstring lists its promises.

    Parameters
    ----------
    directory : pathlib.Path
        The shard's local directory, private to the user; created if it is missing.
    tables : mapping of str to TableSchema
        The shard's tables.
    new_id : callable
        Returns a new unique name each time.
    options : mapping of str to str
        Spark's settings under ``spark.holdfast.<backend>.``, without this prefix; see `parse_options`.
    executor_directory : pathlib.Path, optional
        Holds the directories of this executor's shards; by default `directory`, for a shard on its own.
    """

    #: The `CONTRACT_VERSION` that the class was built for; every concrete class sets it.
    contract_version: ClassVar[int]
    #: Whether the files are on a RAM file system and are lost with the executor.
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
        """Check options and return their values; called on the driver before a query starts.

        Parameters
        ----------
        name : str
            The backend's registered name, for errors.

        Raises
        ------
        InvalidArgumentError
            An option is unknown, or its value is invalid.
        """
        return parse_options(name, {}, options)

    def require_tables(self, runs: Mapping[str, Run]) -> None:
        """Check that every table in `runs`, as passed to `apply` or `load`, is one of the shard's tables.

        Raises
        ------
        NotFoundError
            A table is unknown.
        """
        for table in runs:
            find_table(self.tables, table)

    @abstractmethod
    def view(self, pointer: Pointer) -> View:
        """Return a view of a version.

        Raises
        ------
        NotFoundError
            The backend does not hold the version.
        """

    def properties(self, pointer: Pointer) -> Mapping[str, Any]:
        """Return a version's properties without reading its rows. Raises the same errors as `view`."""
        with self.view(pointer) as view:
            return view.properties

    def is_whole(self, pointer: Pointer) -> bool:
        """Return whether the backend holds a version and can open it."""
        try:
            self.view(pointer).close()
        except (NotFoundError, CorruptionError):
            return False
        return True

    @abstractmethod
    def apply(self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        """Create version `new` by applying writes to version `base` (None: empty state).

        Parameters
        ----------
        runs : mapping of str to Run
            One run of writes and deletes per table.
        properties : mapping
            JSON values to store with the version.

        Raises
        ------
        NotFoundError
            The backend does not hold `base`, or a table is not one of the shard's.
        ConflictError
            `new` already exists.
        UnavailableError
            Local storage is full or failing; no version was created.
        """

    @abstractmethod
    def load(self, pointer: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]) -> None:
        """Create version `pointer` from its complete state; idempotent.

        Replaces a version that has lost files.
        """

    @abstractmethod
    def freeze(self, pointer: Pointer) -> list[Path]:
        """Return immutable local files that together hold the version, for `thaw` here or on another machine.

        Returns
        -------
        list of pathlib.Path
            Files with distinct names. Dropping the version deletes them: a caller that needs them longer must hard-link
            them immediately; the links stay valid.

        Raises
        ------
        NotFoundError
            The backend does not hold the version.
        CorruptionError
            A file is damaged; the version is set aside.
        """

    @abstractmethod
    def thaw(self, pointer: Pointer, folder: Path) -> None:
        """Take ownership of a folder as version `pointer`; idempotent, and safe to call concurrently.

        Replaces a version that has lost files. The version keeps its original properties.

        Parameters
        ----------
        folder : pathlib.Path
            Holds copies of the files that `freeze` returned for this version, under the same names, on the file system
            of `directory`; nothing else may use it. The call moves the folder, or removes it if the backend already
            holds the version or cannot use the files.

        Raises
        ------
        CorruptionError
            A file is missing, truncated or from a different version; no version was created.
        SchemaMismatchError
            The files hold undeclared tables or columns; no version was created.
        UnavailableError
            Local storage is full or failing, or the folder could not be moved and stays; no version was created.

        Notes
        -----
        Copies must be exact: damage inside a file of the right size may go unnoticed until it is read.
        """

    @classmethod
    @contextmanager
    def open_frozen(
        cls, pointer: Pointer, tables: Mapping[str, TableSchema], files: FrozenFiles, new_id: Callable[[], str]
    ) -> Iterator[View]:
        """Open a frozen version for a few reads within the context, without taking ownership of its files.

        Parameters
        ----------
        tables : mapping of str to TableSchema
            The shard's tables.
        files : FrozenFiles
            The files that `freeze` returned for this version, fetched on demand; `thaw` needs whole files.

        Raises
        ------
        CorruptionError, SchemaMismatchError, UnavailableError
            As for `thaw`; reads raise them, too.
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
        """Drop versions and free the storage that only they use; ignores unknown versions. Open views stay valid."""

    @abstractmethod
    def statistics(self) -> BackendStatistics:
        """Return the shard's local statistics."""

    @abstractmethod
    def close(self) -> None:
        """Release the backend's resources. Closing twice is fine."""

    def maintain(self, pointer: Pointer) -> int:
        """Do deferred work on a version, such as large merges; called in the background.

        Returns
        -------
        int
            Number of jobs done; 0 if there was nothing to do.

        Raises
        ------
        NotFoundError
            The backend does not hold the version.
        """
        if pointer not in self.versions():
            raise NotFoundError("no such version here; it may have been dropped", version=str(pointer))
        return 0

    def verify(self) -> list[Path]:
        """Check the local files that an earlier process left, and set damaged versions aside.

        Returns
        -------
        list of pathlib.Path
            The damaged files; empty if none is damaged, or if every read is verified anyway.
        """
        return []

    def remove_leftovers(self, before_ns: int) -> int:
        """Delete unneeded local files last written before `before_ns`; called in the background.

        Returns
        -------
        int
            Number of files deleted; 0 for a backend that leaves no such files.
        """
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
