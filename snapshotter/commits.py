"""The commit log of one shard on object storage.

::

    <operator>/shard-0003/
        commits/<version>-<commit id>               the writes since the previous commit object
        snapshots/<version>-<commit id>-<digest>    see `holdfast.snapshotter.snapshots`

A commit is a separate object or, if small, **carried** in the row of the query's pointer, which Spark makes durable
anyway. The next commit includes the carried commit's writes, and becomes an object once both together are large. So
micro-batches that write little cost no requests::

    pointer row        21-bb                22-cc, 1 KB          23-dd, 2 KB          24-ee
    commits/           21-bb                                                          24-ee: the writes of 22 to 24

Every object is written once under a name that is never reused, and no read requests more bytes than a header declares.
A commit's header holds its `Lineage`, so a restore reads the commit that the pointer names, then all other objects in
parallel, without a listing. An attempt that Spark discards leaves an object that no chain names.

Invariants
----------
* **whole chain**: an object is used only if its digest matches the chain.
* **bounded chain**: a snapshot begins a new chain; `SnapshotPolicy` decides when a snapshot is due.
* **two ways**: commit objects follow each other without gaps, whatever snapshots exist. If a snapshot is damaged, the
  previous snapshot and all later commits give exactly the same version.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc

from holdfast import clock
from holdfast.backends import local_files, stored_file
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.registry import find_backend
from holdfast.backends.run import Run, TableSchema, merge_runs
from holdfast.backends.schema import require_declared
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, StateLostError
from holdfast.mvcc.store import FrozenVersion, PendingCommit, RestoredVersion
from holdfast.snapshotter.fields import refuse, refuse_stray
from holdfast.snapshotter.lineage import Chain, ChainEntry, Lineage
from holdfast.snapshotter.snapshots import Manifest, Snapshots
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "commit"
#: The largest commit that is written or read: a worker holds it in memory.
COMMIT_BYTES_MAX = 4 << 30


@dataclass(frozen=True, kw_only=True)
class _Header(Lineage):
    pointer: Pointer
    shard: str
    rows: Mapping[str, int]
    plain_bytes: Mapping[str, int]


@dataclass(frozen=True)
class Commit:
    """A stored or carried commit that was read and checked."""

    pointer: Pointer  #: The committed version
    #: The objects that the version needs besides this commit; `Lineage.since` lists the versions whose writes the
    #: commit holds, its own last
    lineage: Lineage
    #: By table, the number of written rows and their uncompressed size
    rows: Mapping[str, int]
    plain_bytes: Mapping[str, int]
    size_bytes: int  #: Size of the object
    digest: str
    source: str  #: The name of the commit in errors
    #: The stored rows, by table
    sections: Mapping[str, pa.Buffer] = field(default_factory=dict, repr=False, compare=False)

    @property
    def entry(self) -> ChainEntry:
        """The commit's entry in a chain."""
        return ChainEntry(KIND, self.pointer, self.size_bytes, self.digest, sum(self.plain_bytes.values()))

    def without_rows(self) -> Commit:
        """Return the commit without its sections, which keep the whole object in memory."""
        return replace(self, sections={})

    def run_of(self, schema: TableSchema) -> Run | None:
        """Return the rows of a table; None if the commit wrote none."""
        section = self.sections.get(schema.name)
        if section is None:
            return None
        run = Run.read(section, schema, source=self.source, plain_bytes=self.plain_bytes[schema.name])
        if len(run) != self.rows[schema.name]:
            raise CorruptionError(f"{self.source} holds a different number of rows than it declares", table=schema.name)
        return run


def read_commit(data: bytes | memoryview, shard: str, pointer: Pointer, source: str) -> Commit:
    """Decode a commit, and check its shard and pointer. Raises `CorruptionError`."""
    # Sections are stored plain, with buffers compressed by Arrow, so they are no larger than the object.
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=len(data))
    return replace(_commit(stored, shard, pointer, source), sections=stored.sections)


def read_commit_end(read: stored_file.Read, size_bytes: int, shard: str, pointer: Pointer, source: str) -> Commit:
    """Decode a commit, without its rows, from the end of its object, which no checksum verifies."""
    if size_bytes > COMMIT_BYTES_MAX:
        raise CorruptionError(f"{source} is larger than any commit", size_bytes=size_bytes)
    end = stored_file.decode_end(read, size_bytes, source=source, kind=KIND, plain_bytes_max=size_bytes)
    return _commit(end, shard, pointer, source)


def require_intact(read: stored_file.Read, commit: Commit) -> None:
    """Check a commit's whole object against its digest, reading block by block. Raises `CorruptionError`."""
    stored_file.require_digest(read, commit.size_bytes, commit.digest, source=commit.source, kind=KIND)


def _commit(
    stored: stored_file.StoredFile | stored_file.StoredEnd, shard: str, pointer: Pointer, source: str
) -> Commit:
    header = _Header.read(stored.header, source)
    if (header.pointer, header.shard) != (pointer, shard):
        refuse_stray(source, pointer=header.pointer, shard=header.shard)
    if not header.rows.keys() == header.plain_bytes.keys() == stored.sections.keys():
        refuse(source, "declares different tables than it holds")
    most = stored.size_bytes * stored_file.EXPANSION_MAX
    if sum(header.plain_bytes.values()) > most:
        refuse(source, "declares more bytes than it can hold", most=most)
    lineage = Lineage(header.chain, header.since, header.last)
    if lineage.since[-1:] != (pointer,):
        refuse(source, "does not hold the writes of its own version")
    if lineage.chain and lineage.chain[-1].version >= pointer.version:
        refuse(source, "builds on a version that is not older", older=lineage.chain[-1].pointer)
    return Commit(pointer, lineage, header.rows, header.plain_bytes, stored.size_bytes, stored.digest, source)


@dataclass(frozen=True)
class CommitObjects:
    """The commit objects of one shard."""

    shard: PrefixedStorage
    tables: Mapping[str, TableSchema]

    def encode(self, pointer: Pointer, lineage: Lineage, runs: Mapping[str, Run]) -> tuple[pa.Buffer, ChainEntry]:
        """Encode a commit; return its bytes and its chain entry. Raises `InvalidArgumentError`."""
        plain_bytes = {table: ipc.get_record_batch_size(run.batch) for table, run in runs.items()}
        rows = {table: len(run) for table, run in runs.items()}
        header = {"pointer": str(pointer), "shard": self.shard.prefix, "rows": rows, "plain_bytes": plain_bytes}
        sections = {table: partial(run.write, compression="lz4") for table, run in runs.items()}
        data, digest = stored_file.encode(
            KIND, header | lineage.to_json(), sections, plain_bytes=sum(plain_bytes.values())
        )
        if data.size > COMMIT_BYTES_MAX:
            raise InvalidArgumentError(
                "a micro-batch wrote more to one shard than a commit can hold: use more shards, or smaller batches",
                shard=self.shard.prefix,
                size_bytes=data.size,
                limit_bytes=COMMIT_BYTES_MAX,
            )
        return data, ChainEntry(KIND, pointer, data.size, digest, sum(plain_bytes.values()))

    def decode_carried(self, data: bytes, pointer: Pointer) -> Commit:
        """Decode a commit that the query's pointer carries; raises the same errors as `read_commit`."""
        return read_commit(data, self.shard.prefix, pointer, f"the commit that the query carries as {pointer}")

    def newest(self, pointer: Pointer, carried: bytes | None) -> Commit:
        """Return the commit that the query's pointer carries or names; raises the same errors as `fetch_newest`."""
        return self.fetch_newest(pointer) if carried is None else self.decode_carried(carried, pointer)

    def fetch_newest(self, pointer: Pointer) -> Commit:
        """Fetch the commit that the query's pointer names. Raises `StateLostError`, `CorruptionError`."""
        key = f"commits/{pointer}"
        try:
            data = self.shard.get(key, COMMIT_BYTES_MAX)
        except NotFoundError as exc:
            raise StateLostError(
                "the commit that the query's pointer names is not in the state directory: check that "
                "spark.holdfast.state.dir is the one this query has used, and that nothing was deleted",
                key=f"{self.shard.prefix}/{key}",
                storage=self.shard.inner.url,
            ) from exc
        return read_commit(data, self.shard.prefix, pointer, f"{self.shard.url}/{key}")

    def fetch(self, entry: ChainEntry) -> Commit:
        """Fetch a commit that a chain names. Raises `CorruptionError`."""
        source = f"{self.shard.url}/{entry.key}"
        try:
            data = self.shard.get(entry.key, min(entry.size_bytes, COMMIT_BYTES_MAX))
        except NotFoundError as exc:
            raise CorruptionError(f"{source} is missing, and a later commit builds on it") from exc
        commit = read_commit(data, self.shard.prefix, entry.pointer, source)
        if commit.entry != entry:
            raise CorruptionError(f"{source} is not the object that the commit builds on: it was replaced")
        return commit

    def rows(
        self,
        commits: Sequence[Commit],
        below: Mapping[str, Run] = MappingProxyType({}),
        above: Mapping[str, Run] = MappingProxyType({}),
        *,
        drop_deletes: bool,
    ) -> dict[str, Run]:
        """Merge the rows of `commits`, oldest first, with the runs `below` and `above` them; return a run per table."""
        for commit in commits:  # rows of unknown tables would be lost silently
            require_declared(commit.sections, self.tables)
        rows = {}
        for table, schema in self.tables.items():
            found = [below.get(table), *(commit.run_of(schema) for commit in commits), above.get(table)]
            runs = [run for run in found if run is not None]
            if runs:
                rows[table] = merge_runs(runs, drop_deletes=drop_deletes)
        return rows


#: Bytes of commits that a restore reads at a time; it takes a few times as much memory.
RESTORE_STEP_BYTES = 64 << 20
#: A carried commit covers at most this many versions, because its header lists them.
_VERSIONS_CARRIED = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _RestorePlan:
    base: Pointer | None  #: The version to start from: a local one, or the frozen one
    chain: Chain  #: The version's objects; instead of a damaged snapshot, the objects that it replaced
    commits: Chain  #: The commits of the chain after the base or the snapshot
    frozen: FrozenVersion | None = None  #: The snapshot's files, if the backend takes them over
    #: The snapshot's rows by table, if a different backend wrote it
    below: Mapping[str, Run] = field(default_factory=dict)


@dataclass
class ObjectCommitLog:
    """A `holdfast.mvcc.CommitLog` on object storage, for one shard."""

    storage: ObjectStorage
    shard: str  #: The shard's folder in the storage: ``totals/shard-0003``
    tables: Mapping[str, TableSchema]
    executor: Executor  #: Runs uploads and downloads
    directory: Path  #: The shard's local directory, for snapshot notes and for restores in progress
    backend_name: str | None = None  #: The backend that takes over snapshots' files; None to restore rows instead
    carried_bytes: int = 0  #: Commits up to this size are carried; 0 carries none
    #: The available carried commits: from the query's pointer, and appended since
    carried: dict[Pointer, bytes] = field(default_factory=dict)
    new_id: Callable[[], str] = clock.new_id  #: Returns a new unique name each time
    now_ms: Callable[[], int] = clock.now_ms  #: See `holdfast.snapshotter.snapshots.Snapshots`
    #: Uncompressed bytes of commits that are restored at a time. A single commit may be larger: the worker that made it
    #: had to hold it, too
    step_bytes: int = RESTORE_STEP_BYTES
    # Damaged snapshots and their errors: each step of a restore encounters them again.
    _damaged: dict[ChainEntry, CorruptionError] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def objects(self) -> PrefixedStorage:
        """The objects of the shard."""
        return PrefixedStorage(self.storage, self.shard)

    @property
    def _commits(self) -> CommitObjects:
        return CommitObjects(self.objects, self.tables)

    @property
    def snapshots(self) -> Snapshots:
        """The shard's snapshots."""
        return Snapshots(self.objects, self.executor, self.directory, self.new_id, self.now_ms)

    # Writing.

    def append(self, pointer: Pointer, parent: Mapping[str, Any] | None, runs: Mapping[str, Run]) -> PendingCommit:
        """Encode a commit, and carry it or begin to store it; `parent` has its base's properties."""
        lineage = self.snapshots.notes.apply_to(Lineage.of(parent))
        if lineage.since:
            carried = self._carried_commit(lineage.since[-1])
            runs = self._commits.rows([carried], above=runs, drop_deletes=False)
        covered = Lineage(lineage.chain, (*lineage.since, pointer), lineage.last)
        data, entry = self._commits.encode(pointer, covered, runs)
        if data.size <= self.carried_bytes and len(covered.since) <= _VERSIONS_CARRIED:
            self.carried[pointer] = data.to_pybytes()
            return PendingCommit(covered.to_json(), size_bytes=data.size)
        done = self.executor.submit(self.objects.put, entry.key, data)
        return PendingCommit(Lineage((*lineage.chain, entry), (), entry).to_json(), done, data.size)

    def _carried_commit(self, pointer: Pointer) -> Commit:
        if pointer not in self.carried:
            raise StateLostError(
                "the query's pointer does not carry this version's commit: start the query from its own "
                "checkpoint location",
                version=pointer.version,
                commit=pointer.commit_id,
            )
        return self._commits.decode_carried(self.carried[pointer], pointer)

    def write_snapshot(self, backend: Backend, pointer: Pointer) -> tuple[ChainEntry, Manifest]:
        """Snapshot a version held by `backend`; raises the same errors as `Snapshots.frozen` and `Snapshots.store`."""
        assert self.backend_name is not None
        with self.snapshots.frozen(backend, pointer) as frozen:
            return self.snapshots.store(frozen, self.backend_name)

    # Reading.

    @contextmanager
    def restore(self, pointer: Pointer, held: Collection[Pointer] = ()) -> Iterator[RestoredVersion]:
        """Yield a version, or the next older version on the way to it, as writes since the newest `held` version."""
        is_carried = pointer in self.carried
        commit = self._carried_commit(pointer) if is_carried else self._commits.fetch_newest(pointer)
        with ExitStack() as folders:
            plan = self._plan(commit, {p for p in held if p != pointer}, folders)
            ends = list(accumulate(entry.content_bytes for entry in plan.commits))
            part = plan.commits[: max(1, bisect_right(ends, self.step_bytes))]  # as many as fit
            commits = list(self.executor.map(self._commits.fetch, part))
            size_bytes = sum(entry.content_bytes for entry in (*part, commit.entry))
            if len(part) == len(plan.commits) and (not part or size_bytes <= self.step_bytes):
                own, commits = commit.entry, [*commits, commit]
                reached = commit.lineage if is_carried else Lineage((*commit.lineage.chain, own), (), own)
            else:
                pointer, last = part[-1].pointer, part[-1]
                reached = Lineage(plan.chain[: plan.chain.index(last) + 1], (), last)
            rows = self._commits.rows(commits, plan.below, drop_deletes=plan.base is None)
            restored = RestoredVersion(pointer, plan.base, rows, reached.to_json(), plan.frozen)
            if plan.frozen is None:
                yield restored
            else:
                with self._recording_damage(plan.chain[0]):
                    yield restored

    @contextmanager
    def _recording_damage(self, snapshot: ChainEntry) -> Iterator[None]:
        """Record that a snapshot is damaged, so that later restores bypass it."""
        try:
            yield
        except CorruptionError as exc:
            # A new error, because the caught error references the frames that it passed through.
            self._damaged[snapshot] = CorruptionError(f"{self.objects.url}/{snapshot.key} cannot be used: {exc}")
            raise

    def _plan(self, commit: Commit, held: Collection[Pointer], folders: ExitStack) -> _RestorePlan:
        """Plan how to restore a commit's version; a damaged snapshot is bypassed."""
        chain: Chain = commit.lineage.chain
        later: Chain = ()
        carried = [pointer for pointer in commit.lineage.since if pointer in held]
        if carried:
            return _RestorePlan(carried[-1], chain, ())
        damage: CorruptionError | None = None
        plan: _RestorePlan | None = None
        while plan is None:
            try:
                plan = self._start_of(chain, held, folders)
            except CorruptionError as exc:
                damage = damage or exc
                try:
                    before = self._around(chain, commit)
                except CorruptionError as exc:
                    damage.add_note(f"nor can the version be restored without that snapshot: {exc}")
                    raise damage from damage.__cause__  # by which a look-up distinguishes missing from damaged
                later = (*chain[1:], *later)
                chain, commit = before
        if damage is not None:
            count = len(plan.commits) + len(later) + 1
            _log.warning("restored without a damaged snapshot, from %d commits: %s", count, damage)
        return replace(plan, chain=(*plan.chain, *later), commits=(*plan.commits, *later))

    def _start_of(self, chain: Chain, held: Collection[Pointer], folders: ExitStack) -> _RestorePlan:
        """Plan to start from the newest local version in a chain, else from its downloaded snapshot."""
        places = [i for i, entry in enumerate(chain) if entry.pointer in held]
        if places:
            return _RestorePlan(chain[places[-1]].pointer, chain, chain[places[-1] + 1 :])
        if not chain or chain[0].kind != "snapshot":
            return _RestorePlan(None, chain, chain)
        if chain[0] in self._damaged:
            raise self._damaged[chain[0]]
        with self._recording_damage(chain[0]):
            manifest, folder = folders.enter_context(self.snapshots.downloaded(chain[0]))
            try:
                backend = find_backend(manifest.backend)
            except InvalidArgumentError as exc:
                raise CorruptionError(
                    f"a snapshot was written by a backend that cannot be used here: {exc}",
                    key=f"{self.shard}/{chain[0].key}",
                    storage=self.storage.url,
                ) from exc
            if manifest.backend != self.backend_name:
                return _RestorePlan(None, chain, chain[1:], below=self._thawed_rows(backend, manifest.pointer, folder))
        frozen = FrozenVersion(manifest.pointer, folder)
        return _RestorePlan(frozen.pointer, chain, chain[1:], frozen)

    def _around(self, chain: Chain, commit: Commit) -> tuple[Chain, Commit]:
        """Return the older chain that a damaged snapshot replaced, and the newest commit on it."""
        first = self._commits.fetch(chain[1]) if len(chain) > 1 else commit
        last = first.lineage.last
        if last is None:  # the oldest commit has no predecessor
            return (), first
        before = self._commits.fetch(last)
        return (*before.lineage.chain, last), before

    def _thawed_rows(self, written_by: type[Backend], pointer: Pointer, folder: Path) -> dict[str, Run]:
        """Read a snapshot's rows through the backend that wrote it."""
        rows = {}
        with (
            local_files.staged_folder(folder.parent, self.new_id(), fsync=False) as home,
            written_by(home.path, self.tables, self.new_id) as backend,
        ):
            backend.thaw(pointer, folder)
            with backend.view(pointer) as view:
                for table in self.tables:
                    found = list(view.scan(table))
                    if found:
                        rows[table] = merge_runs(found, drop_deletes=True)
        return rows
