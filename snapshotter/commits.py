"""The commit log of one shard on object storage.

::

    <operator>/shard-0003/
        commits/<version>-<commit id>               what was written since the commit object before it
        snapshots/<version>-<commit id>-<digest>    see `holdfast.snapshotter.snapshots`

A commit is an object of its own, or **carried**: a small one travels in the row of the query's pointer, which Spark
makes durable anyway. The next commit holds what the carried one holds, too, and becomes an object when together
they are large. So micro-batches that write little cost no requests::

    pointer row        21-bb                22-cc, 1 KB          23-dd, 2 KB          24-ee
    commits/           21-bb                                                          24-ee: what 22 to 24 wrote

Every object is written once under a name that is never used again. A commit's header holds its `Lineage`, so a
version is restored from its pointer with one read, then the rest in parallel, and no listing. An attempt that
Spark dropped leaves an object that no chain names.

Invariants
----------
* **whole chain**: an object is used only if its digest is the one that the chain names.
* **bounded chain**: a snapshot begins a new chain; `SnapshotPolicy` says when one is due.
* **two ways**: commit objects follow each other without a gap, whatever snapshots were made meanwhile. Where a
  snapshot is damaged, the one before it and the commits since give exactly the same version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdfast import clock
from holdfast.backends import local_files, stored_file
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Run, TableSchema, merge_runs
from holdfast.errors import CorruptionError, NotFoundError, StateLostError
from holdfast.mvcc.store import FrozenVersion, RestoredVersion
from holdfast.snapshotter.lineage import Chain, ChainEntry, Lineage
from holdfast.snapshotter.manifest import NEVER_CLEANED_UP, CleanedUp, Manifest
from holdfast.snapshotter.snapshots import Downloaded, Snapshots, send_at_once
from holdfast.snapshotter.storage import ObjectStorage

#: A carried commit covers no more versions than these: their names are in its header.
_VERSIONS_CARRIED = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingCommit:
    """A commit on its way; see `holdfast.mvcc.store.PendingCommit`."""

    properties: Mapping[str, Any]
    done: Future[None] | None

    def wait(self) -> None:
        """Return when the commit is durable, or in the hands of the query; raise what went wrong."""
        if self.done is not None:
            self.done.result()


@dataclass
class Objects:
    """What a version is made of, read: perhaps a snapshot, and commits on it, oldest first."""

    commits: list[stored_file.StoredFile]
    snapshot: Downloaded | None = None


@dataclass
class ObjectCommitLog:
    """A `holdfast.mvcc.CommitLog` on object storage, for one shard.

    Parameters
    ----------
    storage : ObjectStorage
    shard : str
        The shard's place in the storage: ``totals/shard-0003``.
    tables : mapping of str to TableSchema
    executor : concurrent.futures.Executor
        Runs uploads and downloads.
    directory : pathlib.Path
        The shard's local directory: for notes of snapshots, and for what is being restored.
    backend_name : str or None
        The backend that takes over the files of snapshots; None to get rows in any case.
    carried_bytes : int
        Commits up to this size are carried; 0 carries none.
    carried : dict of Pointer to bytes
        The carried commits in reach: the one that came with the query's pointer, and those that were appended.
    new_id : callable
        Returns a new unique name each time.
    before_part, now_ms : callable
        See `holdfast.snapshotter.snapshots.Snapshots`.
    """

    storage: ObjectStorage
    shard: str
    tables: Mapping[str, TableSchema]
    executor: Executor
    directory: Path
    backend_name: str | None = None
    carried_bytes: int = 0
    carried: dict[Pointer, bytes] = field(default_factory=dict)
    new_id: Callable[[], str] = clock.new_id
    before_part: Callable[[int], None] = send_at_once
    now_ms: Callable[[], int] = clock.now_ms

    @property
    def snapshots(self) -> Snapshots:
        """The shard's snapshots."""
        return Snapshots(
            self.storage, self.shard, self.executor, self.directory, self.new_id, self.before_part, self.now_ms
        )

    # Writing.

    def append(self, pointer: Pointer, parent: Mapping[str, Any] | None, runs: Mapping[str, Run]) -> PendingCommit:
        """Encode the commit, and carry it or start to store it.

        Parameters
        ----------
        parent : mapping or None
            Properties of the version it builds on; None where it builds on nothing.

        Raises
        ------
        StateLostError
            The commit of the parent was carried, and did not come with the query's pointer.
        """
        lineage = self.snapshots.notes.apply_to(Lineage.of(parent))
        if lineage.since:
            runs = self._merged([self._carried_commit(Pointer.parse(lineage.since[-1]))], runs)
        covered = Lineage(lineage.chain, [*lineage.since, str(pointer)], lineage.last)
        header = {
            "pointer": str(pointer),
            "shard": self.shard,
            "rows": {table: len(run) for table, run in runs.items()},
            **covered.to_json(),
        }
        sections = {table: partial(run.write, compression="lz4") for table, run in runs.items()}
        data, digest = stored_file.encode("commit", header, sections)
        if data.size <= self.carried_bytes and len(covered.since) <= _VERSIONS_CARRIED:
            self.carried[pointer] = data.to_pybytes()
            return PendingCommit(covered.to_json(), None)
        entry = ChainEntry("commit", str(pointer), data.size, digest)
        done = self.executor.submit(self.storage.put, f"{self.shard}/{entry.key}", data)
        return PendingCommit(Lineage([*lineage.chain, entry], [], entry).to_json(), done)

    def _merged(self, older: Sequence[stored_file.StoredFile], newer: Mapping[str, Run]) -> dict[str, Run]:
        merged = {}
        for table in self.tables:
            runs = [*self._runs_of(table, older), *([newer[table]] if table in newer else [])]
            if runs:
                merged[table] = merge_runs(runs, drop_deletes=False)
        return merged

    def _carried_commit(self, pointer: Pointer) -> stored_file.StoredFile:
        if pointer not in self.carried:
            raise StateLostError(
                "the commit of this version was kept in the row of the query's pointer, and did not come with it: "
                "start the query from its own checkpoint location",
                version=pointer.version,
                commit=pointer.commit_id,
            )
        return self._checked(self.carried[pointer], pointer, f"the commit that the query carries as {pointer}")

    def write_snapshot(
        self, backend: Backend, pointer: Pointer, cleaned: CleanedUp = NEVER_CLEANED_UP
    ) -> tuple[ChainEntry, Manifest]:
        """Store one version; see `holdfast.snapshotter.snapshots.Snapshots.write`.

        Parameters
        ----------
        backend : Backend
            Of the kind that `backend_name` names; holds the version.
        """
        assert self.backend_name is not None
        return self.snapshots.write(backend, self.backend_name, pointer, cleaned)

    # Reading.

    @contextmanager
    def restore(self, pointer: Pointer, held: Collection[Pointer] = ()) -> Iterator[RestoredVersion]:
        """Read a version; nothing local changes but a folder that is gone after the context.

        Parameters
        ----------
        held : collection of Pointer
            Versions held locally. What the newest of them in the version's lineage holds is not read.

        Raises
        ------
        StateLostError
            The commit is not in the storage.
        CorruptionError
            An object of the chain is missing, damaged, or not the one that the chain names, and no older snapshot
            stands in for it.
        UnavailableError
            The storage cannot be read now, or local storage is full.
        """
        commit = self._carried_commit(pointer) if pointer in self.carried else self._newest_commit(pointer)
        lineage = Lineage.of(commit.header, self._source_of(commit))
        base, chain = self._after(lineage, pointer, held)
        with ExitStack() as folders:
            if base is None:
                objects = self._read_all(lineage.chain, commit, folders)
            else:
                objects = Objects([*self._fetch_all(chain), commit])
            yield self._restored(objects, base, self._properties(pointer, commit, lineage))

    def _after(self, lineage: Lineage, pointer: Pointer, held: Collection[Pointer]) -> tuple[Pointer | None, Chain]:
        """Return the newest version held that the lineage comes from, and the chain after it."""
        names = {str(p) for p in held if p != pointer}
        known = [name for name in lineage.since if name in names]
        if known:
            return Pointer.parse(known[-1]), []
        places = [i for i, entry in enumerate(lineage.chain) if entry.pointer in names]
        return (
            (Pointer.parse(lineage.chain[places[-1]].pointer), lineage.chain[places[-1] + 1 :])
            if places
            else (None, [])
        )

    def _properties(self, pointer: Pointer, commit: stored_file.StoredFile, lineage: Lineage) -> dict[str, Any]:
        if pointer in self.carried:
            return lineage.to_json()
        entry = ChainEntry("commit", str(pointer), commit.size_bytes, commit.digest)
        return Lineage([*lineage.chain, entry], [], entry).to_json()

    def _newest_commit(self, pointer: Pointer) -> stored_file.StoredFile:
        path = f"{self.shard}/commits/{pointer}"
        try:
            data = self.storage.get(path)
        except NotFoundError as exc:
            raise StateLostError(
                "the commit that the query's pointer names is not in the checkpoint directory: check that "
                "spark.holdfast.checkpoint.dir is the one this query has used, and that nothing was deleted",
                key=path,
                storage=self.storage.url,
            ) from exc
        return self._checked(data, pointer, f"{self.storage.url}/{path}")

    def _read_all(self, chain: Chain, newest: stored_file.StoredFile, folders: ExitStack) -> Objects:
        """Read everything that a chain names; where its snapshot is damaged, what that one stands for."""
        commits = [*self._fetch_all([entry for entry in chain if entry.kind == "commit"]), newest]
        if not chain or chain[0].kind != "snapshot":
            return Objects(commits)
        try:
            return Objects(commits, folders.enter_context(self.snapshots.downloaded(chain[0])))
        except CorruptionError as damage:
            try:
                objects = self._read_around(commits, folders)
            except CorruptionError as exc:
                damage.add_note(f"nor can the version be restored without that snapshot: {exc}")
                raise damage from exc
            _log.warning("restored without a damaged snapshot, from %d commits: %s", len(objects.commits), damage)
            return objects

    def _read_around(self, commits: list[stored_file.StoredFile], folders: ExitStack) -> Objects:
        last = Lineage.of(commits[0].header).last
        if last is None:  # the oldest commit begins at nothing
            return Objects(commits)
        before = self._fetch(last)
        objects = self._read_all(Lineage.of(before.header, self._source_of(before)).chain, before, folders)
        return Objects([*objects.commits, *commits], objects.snapshot)

    def _fetch_all(self, chain: Chain) -> list[stored_file.StoredFile]:
        return list(self.executor.map(self._fetch, chain))

    def _fetch(self, entry: ChainEntry) -> stored_file.StoredFile:
        source = f"{self.storage.url}/{self.shard}/{entry.key}"
        try:
            data = self.storage.get(f"{self.shard}/{entry.key}")
        except NotFoundError as exc:
            raise CorruptionError(f"{source} is missing, and a later commit builds on it") from exc
        stored = stored_file.decode(data, source=source, kind=entry.kind)
        if stored.digest != entry.digest:
            raise CorruptionError(f"{source} is not the object that the commit builds on: it was replaced")
        return stored

    def _checked(self, data: bytes | memoryview, pointer: Pointer, source: str) -> stored_file.StoredFile:
        stored = stored_file.decode(data, source=source, kind="commit")
        if stored.header.get("pointer") != str(pointer) or stored.header.get("shard") != self.shard:
            raise CorruptionError(
                f"{source} belongs elsewhere: it was moved or copied",
                pointer=stored.header.get("pointer"),
                shard=stored.header.get("shard"),
            )
        return stored

    def _source_of(self, commit: stored_file.StoredFile) -> str:
        return f"{self.storage.url}/{self.shard}/commits/{commit.header.get('pointer')}"

    def _restored(self, objects: Objects, base: Pointer | None, properties: Mapping[str, Any]) -> RestoredVersion:
        if objects.snapshot is None:
            return RestoredVersion(base, self._rows(objects.commits, {}, drop_deletes=base is None), properties)
        manifest, folder = objects.snapshot.manifest, objects.snapshot.folder
        if manifest.backend == self.backend_name:
            frozen = FrozenVersion(manifest.pointer, folder)
            runs = self._rows(objects.commits, {}, drop_deletes=False)
            return RestoredVersion(manifest.pointer, runs, properties, frozen)
        below = self._thawed_rows(objects.snapshot)
        return RestoredVersion(None, self._rows(objects.commits, below, drop_deletes=True), properties)

    def _rows(
        self, commits: Sequence[stored_file.StoredFile], below: Mapping[str, Run], *, drop_deletes: bool
    ) -> dict[str, Run]:
        rows = {}
        for table in self.tables:
            runs = [*([below[table]] if table in below else []), *self._runs_of(table, commits)]
            if runs:
                rows[table] = merge_runs(runs, drop_deletes=drop_deletes)
        return rows

    def _runs_of(self, table: str, commits: Sequence[stored_file.StoredFile]) -> list[Run]:
        return [
            Run.read(commit.sections[table], self.tables[table], source=self._source_of(commit))
            for commit in commits
            if table in commit.sections
        ]

    def _thawed_rows(self, snapshot: Downloaded) -> dict[str, Run]:
        """Read a snapshot that another backend wrote, by that backend."""
        pointer, rows = snapshot.manifest.pointer, {}
        with (
            local_files.staged_folder(snapshot.folder.parent, self.new_id(), fsync=False) as home,
            find_backend(snapshot.manifest.backend)(home.path, self.tables, self.new_id) as backend,
        ):
            backend.thaw(pointer, snapshot.folder)
            with backend.view(pointer) as view:
                for table in self.tables:
                    found = list(view.scan(table))
                    if found:
                        rows[table] = merge_runs(found, drop_deletes=True)
        return rows
