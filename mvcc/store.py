"""The versioned store of one shard.

Versions are columns, keys are rows; a transaction begins at a pointer and sees only that column, whatever else
exists::

              3-aa      4-bb       4-cc        5-dd
    "ann"      1         2          7           2        begin(4-bb) reads ann=2, never 7: 4-cc is a different
    "bob"      5         5          -           6        attempt at version 4, also made from 3-aa
    "cem"      -         1          -           1        begin(3-aa) again reads ann=1: rolling back needs
                                                         no operation, only an older pointer
    3-aa ─┬─▶ 4-bb ─▶ 5-dd
          └─▶ 4-cc

Invariants
----------
* **snapshot**: a transaction reads exactly the version its pointer names, plus its own writes.
* **isolation**: no version holds writes of an attempt that is not its ancestor.
* **never empty**: a pointer whose state cannot be found is an error; only ``begin(None)`` begins with empty state.
* **durable first**: with a commit log, `Transaction.commit` returns a pointer only after the log has stored the
  commit.
* **readers never block**: views and uploads take no lock that a writer waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.backends.base import Backend, Pointer, View
from holdfast.backends.column_names import Names
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    StateLostError,
    UnavailableError,
)
from holdfast.mvcc.transaction import Transaction

#: Attempts to restore a version that other processes drop again: tasks abandoned by Spark may still run.
RESTORE_TRIES = 4


@dataclass(frozen=True)
class FrozenVersion:
    """A version as the files that a backend froze."""

    pointer: Pointer
    folder: Path  #: Holds the files and nothing else; passed to `holdfast.backends.base.Backend.thaw`


@dataclass(frozen=True)
class RestoredVersion:
    """A version from the commit log: its complete state, or the writes since an older version."""

    #: The requested version; or, if that is too large to restore at once, an older version of its lineage to make
    #: first. Once the backend holds the older version, the next `CommitLog.restore` continues from it.
    pointer: Pointer
    base: Pointer | None  #: The version that `runs` build on; None if they are the complete state
    runs: Mapping[str, Run]  #: By table
    properties: Mapping[str, Any]  #: JSON values that the log keeps with the version
    frozen: FrozenVersion | None = None  #: The base's files, unless the backend holds the base


@dataclass(frozen=True)
class PendingCommit:
    """A commit that the log is storing."""

    properties: Mapping[str, Any]  #: JSON values to keep with the new version; known before the commit is durable
    done: Future[None] | None = None  #: The upload; None if the query's pointer carries the commit
    size_bytes: int = 0  #: Size of the commit as stored or carried

    def wait(self) -> None:
        """Wait until the commit is durable; raise the upload's error if it failed."""
        if self.done is not None:
            self.done.result()


class CommitLog(Protocol):
    """Makes commits durable; `holdfast.snapshotter` implements it on object storage."""

    def append(self, pointer: Pointer, parent: Mapping[str, Any] | None, runs: Mapping[str, Run]) -> PendingCommit:
        """Start to store one commit.

        Parameters
        ----------
        parent : mapping or None
            The properties of the version that the commit builds on.
        """

    def restore(self, pointer: Pointer, held: Collection[Pointer] = ()) -> AbstractContextManager[RestoredVersion]:
        """Return a context with a version: the writes since its newest ancestor in `held`, or else its complete state.

        The version may be an older one, on the way to the requested version; see `RestoredVersion`. The context
        deletes its files at the end unless a backend has taken them. If they cannot be opened, raise the
        `CorruptionError` within the context: the next restore avoids the files if possible.

        Raises
        ------
        StateLostError, CorruptionError
            The version cannot be restored.
        """


class VersionedStore:
    """Begin, commit, read and prune versions of one shard.

    Parameters
    ----------
    backend : Backend
        Holds the versions; the store does not close it.
    log : CommitLog, optional
        Makes commits durable and restores versions. Without one, state is lost with the backend.
    declared : mapping of str to TableSchema, optional
        The columns that transactions read and write, for some of the backend's tables; by default all stored columns.
    names : mapping of str to mapping, optional
        By declared table, the stored names of its columns if they differ (`holdfast.backends.column_names`).

    Notes
    -----
    Threads: transactions are for one thread each; the store itself may be shared.
    """

    def __init__(
        self,
        backend: Backend,
        log: CommitLog | None = None,
        declared: Mapping[str, TableSchema] | None = None,
        names: Mapping[str, Names] | None = None,
    ) -> None:
        self._backend = backend
        self._log = log
        self._declared = declared
        self._names = names

    def begin(self, pointer: Pointer | None, version: int | None = None) -> Transaction:
        """Begin a transaction on the version that `pointer` names.

        Parameters
        ----------
        pointer : Pointer or None
            None begins with empty state, which is valid only if no state was ever committed.
        version : int, optional
            The version to commit; by default the next one.

        Raises
        ------
        StateLostError
            The backend does not hold the version, and there is no log to restore it from.
        CorruptionError
            The log's copy of the version is damaged or incomplete.
        """
        base_version = pointer.version if pointer else None
        version = (base_version or 0) + 1 if version is None else version
        if version < 0 or (base_version is not None and version <= base_version):
            raise InvalidArgumentError(
                "a transaction must commit a later version than it reads", version=version, reads=base_version
            )
        view = self.read_at(pointer) if pointer else None
        return Transaction(pointer, version, view, self._backend.tables, self._commit, self._declared, self._names)

    def read_at(self, pointer: Pointer) -> View:
        """Return a view of a version; restore it first if the backend does not hold it.

        Raises
        ------
        StateLostError, CorruptionError
            As for `begin`.
        UnavailableError
            Another process dropped the version each time it was restored.
        """
        view = self._view(pointer)
        failure: HoldfastError | None = None
        tries = 0
        while view is None:
            if tries == RESTORE_TRIES:
                raise _dropped_by_others(pointer) from failure
            tries += 1
            held = self._backend.versions()
            if pointer in held:  # it has lost files, or another process has just restored it
                view = self._view(pointer)
                if view is not None:
                    break
                self._backend.drop([pointer])
            # The newest local version was unusable: restore the complete state.
            failure = self._restore(pointer, [] if failure else [other for other in held if other != pointer])
            view = self._view(pointer)
        return view

    def _view(self, pointer: Pointer) -> View | None:
        """Return a view of a version; None if the backend does not hold it."""
        try:
            return self._backend.view(pointer)
        except NotFoundError as missing:
            if self._log is None:
                raise StateLostError(
                    "the state was lost with the process that held it, or dropped because a query uses the "
                    "operator's output twice, and no state directory is set: restart the query from the "
                    "beginning, and set spark.holdfast.state.dir to keep state",
                    version=pointer.version,
                    commit=pointer.commit_id,
                ) from missing
        return None

    def _restore(self, pointer: Pointer, held: Collection[Pointer]) -> HoldfastError | None:
        """Make a version from the log, in steps; return the error if the base version vanished or was set aside."""
        on_the_way: Pointer | None = None
        while True:
            with self._opened(pointer, held) as restored:
                try:
                    is_new = self._make(restored)
                except (NotFoundError, CorruptionError) as exc:
                    if restored.base is None:
                        raise
                    return exc
            if on_the_way is not None:
                self._backend.drop([on_the_way])
            if restored.pointer == pointer:
                return None
            held, on_the_way = [restored.pointer], restored.pointer if is_new else None

    @contextmanager
    def _opened(self, pointer: Pointer, held: Collection[Pointer]) -> Iterator[RestoredVersion]:
        """Yield the log's version after thawing its frozen base; try again if the backend cannot open the base."""
        assert self._log is not None
        refused: set[Pointer] = set()
        while True:
            frozen: FrozenVersion | None = None
            try:
                with self._log.restore(pointer, held) as restored:
                    frozen = restored.frozen
                    if frozen is not None:
                        self._backend.thaw(frozen.pointer, frozen.folder)
                    frozen = None
                    yield restored
                    return
            except CorruptionError:
                if frozen is None or frozen.pointer in refused:
                    raise
                refused.add(frozen.pointer)

    def _make(self, restored: RestoredVersion) -> bool:
        """Make the version that the log returned; return False if the backend already held it."""
        new = restored.pointer
        if restored.base is None:
            was_here = new in self._backend.versions()
            self._backend.load(new, restored.runs, restored.properties)
            return not was_here
        for _ in range(RESTORE_TRIES):
            try:
                self._backend.apply(restored.base, new, restored.runs, restored.properties)
                return True
            except ConflictError:
                if (view := self._view(new)) is not None:
                    view.close()
                    return False  # another worker has restored it first
                self._backend.drop([new])  # it has lost files
        raise _dropped_by_others(new)

    def _commit(self, transaction: Transaction, runs: Mapping[str, Run]) -> Pointer:
        pointer = Pointer(transaction.version, self._backend.new_id())
        if self._log is None:
            self._apply(transaction.base, pointer, runs, {})
            return pointer
        parent = transaction.view.properties if transaction.view else None
        pending = self._log.append(pointer, parent, runs)
        transaction.measures.commit_bytes = pending.size_bytes
        transaction.measures.stored_bytes = 0 if pending.done is None else pending.size_bytes
        try:
            self._apply(transaction.base, pointer, runs, pending.properties)
        finally:
            try:
                pending.wait()
            except BaseException:
                self._backend.drop([pointer])
                raise
        return pointer

    def _apply(
        self, base: Pointer | None, new: Pointer, runs: Mapping[str, Run], properties: Mapping[str, Any]
    ) -> None:
        """Apply the writes; restore the base if it was dropped since the transaction began."""
        for _ in range(RESTORE_TRIES):
            try:
                self._backend.apply(base, new, runs, properties)
                return
            except NotFoundError:
                if base is None:
                    raise
            self.read_at(base).close()
        raise _dropped_by_others(base)

    def prune(self, accepted: Pointer) -> list[Pointer]:
        """Drop versions that no later transaction will begin at.

        Parameters
        ----------
        accepted : Pointer
            The version that the query has accepted and begins its next transaction at. It and all later versions stay.
            If an older version is needed after all, the commit log has it. Open views stay valid.

        Returns
        -------
        list of Pointer
            The dropped versions.
        """
        going = [p for p in self._backend.versions() if p.version <= accepted.version and p != accepted]
        self._backend.drop(going)
        return going


def _dropped_by_others(pointer: Pointer | None) -> UnavailableError:
    return UnavailableError(
        "another process dropped this version each time it was restored: stop whatever else uses the shard's "
        "directory, and restart the query; no state is lost",
        pointer=pointer,
    )
