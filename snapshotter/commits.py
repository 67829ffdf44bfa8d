"""The commit log of one shard on object storage.

::

    <operator>/shard-0003/
        commits/<version>-<commit id>               what one micro-batch wrote: one run a table
        snapshots/<version>-<commit id>-<digest>    one whole version: one run a table

Every object is written once under a name that is never used again. A snapshot's name holds 16 digits of its
digest, because two executors may write one of the same version, and equal state need not be equal bytes. A
commit's header holds its **chain**: the snapshot it builds on, if any, and the commits since, each with size
and digest::

    snapshots/20-aa-7c1e… ◀─ commits/21-bb ◀─ commits/22-cc ◀─ commits/23-dd
                             chain(23-dd) = [snapshots/20-aa-7c1e…, commits/21-bb, commits/22-cc]

So a version is restored from its pointer with one read, then the rest in parallel, and no listing. An
attempt that Spark dropped leaves an object that no chain names.

Invariants
----------
* **whole chain**: an object is used only if its digest is the one that the chain names.
* **bounded chain**: a snapshot begins a new chain; `SnapshotPolicy` says when one is due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast import clock
from holdfast.backends import local_files, stored_file
from holdfast.backends.base import Pointer, View
from holdfast.backends.run import Run, TableSchema, merge_runs
from holdfast.errors import CorruptionError, NotFoundError, StateLostError
from holdfast.mvcc.store import RestoredVersion
from holdfast.snapshotter.storage import ObjectStorage

_NOTES_KEPT = 4


@dataclass(frozen=True)
class ChainEntry:
    """One object that a version is made of.

    Attributes
    ----------
    kind : {"snapshot", "commit"}
    pointer : str
        The version that the object belongs to.
    size_bytes : int
    digest : str
        Of the object's bytes; see `holdfast.backends.stored_file`.
    """

    kind: str
    pointer: str
    size_bytes: int
    digest: str

    @property
    def key(self) -> str:
        """Where the object lies, below the shard."""
        name = f"{self.pointer}-{self.digest[:16]}" if self.kind == "snapshot" else self.pointer
        return f"{self.kind}s/{name}"


Chain = list[ChainEntry]


def chain_of(properties: Mapping[str, Any] | None, source: str = "a local version") -> Chain:
    """Return the chain that a version's properties or a commit's header hold; empty where there is none.

    Raises
    ------
    CorruptionError
        It is no chain; the message calls its place `source`.
    """
    try:
        return [ChainEntry(**entry) for entry in (properties or {}).get("chain", [])]
    except TypeError as exc:
        raise CorruptionError(f"{source} holds no readable chain of commits") from exc


@dataclass(frozen=True)
class SnapshotPolicy:
    """When a shard's chain is long enough for a new snapshot.

    Attributes
    ----------
    max_commits : int
        Commits since the last snapshot after which the background writes one.
    """

    max_commits: int = 20

    def is_due(self, chain: Chain) -> bool:
        """Whether the background should write a snapshot of the version with this chain."""
        return sum(e.kind == "commit" for e in chain) >= self.max_commits

    def is_overdue(self, chain: Chain) -> bool:
        """Whether the chain is so long that the next commit must wait for a snapshot."""
        return sum(e.kind == "commit" for e in chain) >= 4 * self.max_commits


class PendingPut:
    """A commit object on its way; see `holdfast.mvcc.store.PendingCommit`."""

    def __init__(self, properties: Mapping[str, Any], done: Future[None]) -> None:
        self.properties = properties
        self._done = done

    def wait(self) -> None:
        """Return when the object is durable; raise what went wrong."""
        self._done.result()


class ObjectCommitLog:
    """A `holdfast.mvcc.CommitLog` on object storage.

    Parameters
    ----------
    storage : ObjectStorage
    prefix : str
        Of the shard: ``<operator>/shard-0003``.
    tables : mapping of str to TableSchema
    executor : concurrent.futures.Executor
        Runs uploads and downloads.
    snapshot_notes : pathlib.Path
        Local directory in which `write_snapshot` leaves a note of each snapshot, for the next commit.
    new_id : callable
        Returns a new unique name each time.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        prefix: str,
        tables: Mapping[str, TableSchema],
        executor: Executor,
        snapshot_notes: Path,
        new_id: Callable[[], str] = clock.new_id,
    ) -> None:
        self._storage = storage
        self._prefix = prefix
        self._tables = tables
        self._executor = executor
        self._notes = snapshot_notes
        self._new_id = new_id

    def append(self, pointer: Pointer, parent: Mapping[str, Any] | None, runs: Mapping[str, Run]) -> PendingPut:
        """Encode the commit and start to store it.

        Parameters
        ----------
        parent : mapping or None
            Properties of the version it builds on; None where it builds on nothing.
        """
        chain = self.shorten(chain_of(parent))
        entry, data = self._encode("commit", pointer, chain, runs)
        done = self._executor.submit(self._storage.put, self._path(entry), data)
        return PendingPut({"chain": [asdict(e) for e in [*chain, entry]]}, done)

    def write_snapshot(self, pointer: Pointer, view: View) -> ChainEntry:
        """Store one whole version and leave a note of it for the commits that follow.

        Raises
        ------
        UnavailableError
            Durable or local storage failed; commits go on without the snapshot.
        """
        runs = {}
        for table in self._tables:
            stretches = list(view.scan(table))
            if stretches:
                runs[table] = merge_runs(stretches, drop_deletes=True)
        entry, data = self._encode("snapshot", pointer, [], runs)
        self._storage.put(self._path(entry), data)
        self._leave_note(entry)
        return entry

    def _leave_note(self, entry: ChainEntry) -> None:
        note, _ = stored_file.encode("snapshot-note", asdict(entry))
        with local_files.writing(self._notes):
            local_files.make_private_folder(self._notes)
            temporary = self._notes / f".{self._new_id()}"
            temporary.write_bytes(note)
            temporary.rename(self._notes / entry.pointer)
            # Chains that a running attempt may still shorten end at one of the newest.
            noted = sorted(map(Pointer.parse, local_files.list_folder(self._notes)))
            for old in noted[:-_NOTES_KEPT]:
                (self._notes / str(old)).unlink(missing_ok=True)

    def _read_note(self, pointer: str) -> ChainEntry | None:
        """Return what a note says; None where it is gone, or says nothing: it only saves work."""
        try:
            header = local_files.read_header(self._notes / pointer, "snapshot-note")
        except (NotFoundError, CorruptionError):
            return None
        return chain_of({"chain": [header]})[0]

    def restore(self, pointer: Pointer, held: Collection[Pointer] = ()) -> RestoredVersion:
        """Read a version; nothing local changes.

        Parameters
        ----------
        held : collection of Pointer
            Versions held locally. Commits up to the newest of them in the version's chain are not read.

        Raises
        ------
        StateLostError
            The commit object is not in the storage.
        CorruptionError
            An object of the chain is missing, damaged, or not the one that the chain names.
        UnavailableError
            The storage cannot be read now.
        """
        path = f"{self._prefix}/commits/{pointer}"
        try:
            data = self._storage.get(path)
        except NotFoundError as exc:
            raise StateLostError(
                "the commit that the query's pointer names is not in the checkpoint directory: check that "
                "spark.holdfast.checkpoint.dir is the one this query has used, and that nothing was deleted",
                key=path,
                storage=self._storage.url,
            ) from exc
        source = f"{self._storage.url}/{path}"
        commit = stored_file.decode(data, source=source, kind="commit")
        self._check_identity(commit, pointer, source)
        chain = chain_of(commit.header, source)
        names = {str(p) for p in held}
        known = [i for i, entry in enumerate(chain) if entry.pointer in names]
        base = Pointer.parse(chain[known[-1]].pointer) if known else None
        objects = [*self._executor.map(self._fetch, chain[known[-1] + 1 :] if known else chain), commit]
        runs = {t: self._merge(t, objects, drop_deletes=base is None) for t in self._tables}
        entry = ChainEntry("commit", str(pointer), commit.size_bytes, commit.digest)
        return RestoredVersion(
            base,
            {t: run for t, run in runs.items() if run is not None},
            {"chain": [asdict(e) for e in [*chain, entry]]},
        )

    def _fetch(self, entry: ChainEntry) -> stored_file.StoredFile:
        source = f"{self._storage.url}/{self._path(entry)}"
        try:
            data = self._storage.get(self._path(entry))
        except NotFoundError as exc:
            raise CorruptionError(f"{source} is missing, and a later commit builds on it") from exc
        stored = stored_file.decode(data, source=source, kind=entry.kind)
        if stored.digest != entry.digest:
            raise CorruptionError(f"{source} is not the object that the commit builds on: it was replaced")
        return stored

    def _check_identity(self, stored: stored_file.StoredFile, pointer: Pointer, source: str) -> None:
        if stored.header.get("pointer") != str(pointer) or stored.header.get("shard") != self._prefix:
            raise CorruptionError(
                f"{source} belongs elsewhere: it was moved or copied",
                pointer=stored.header.get("pointer"),
                shard=stored.header.get("shard"),
            )

    def _merge(self, table: str, objects: Sequence[stored_file.StoredFile], *, drop_deletes: bool) -> Run | None:
        schema = self._tables[table]
        runs = [
            Run.read(
                o.sections[table],
                schema,
                source=f"{self._storage.url}/{self._prefix}/{o.kind}s/{o.header['pointer']}",
            )
            for o in objects
            if table in o.sections
        ]
        return merge_runs(runs, drop_deletes=drop_deletes) if runs else None

    def _encode(self, kind: str, pointer: Pointer, chain: Chain, runs: Mapping[str, Run]) -> tuple[ChainEntry, Any]:
        header = {
            "pointer": str(pointer),
            "shard": self._prefix,
            "chain": [asdict(e) for e in chain],
            "rows": {table: len(run) for table, run in runs.items()},
        }
        sections = {table: partial(run.write, compression="lz4") for table, run in runs.items()}
        data, digest = stored_file.encode(kind, header, sections)
        return ChainEntry(kind, str(pointer), data.size, digest), data

    def shorten(self, chain: Chain) -> Chain:
        """Return the chain with everything up to its newest snapshotted version replaced by the snapshot."""
        noted = set(local_files.list_folder(self._notes))
        for i in reversed(range(len(chain))):
            if chain[i].kind == "commit" and chain[i].pointer in noted:
                snapshot = self._read_note(chain[i].pointer)
                if snapshot is not None:
                    return [snapshot, *chain[i + 1 :]]
        return chain

    def _path(self, entry: ChainEntry) -> str:
        return f"{self._prefix}/{entry.key}"
