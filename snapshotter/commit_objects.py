"""Commits as stored files: encodes, fetches, checks and reads them; never allocates more than a header declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa
import pyarrow.ipc as ipc

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.run import Run, TableSchema, merge_runs
from holdfast.backends.schema import require_declared
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError, StateLostError
from holdfast.snapshotter.fields import Fields, refuse, refuse_stray
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage

KIND = "commit"
#: The largest commit written or read: a worker holds it in memory to make or restore it.
COMMIT_BYTES_MAX = 4 << 30


@dataclass(frozen=True, kw_only=True)
class _Header(Lineage):
    """The header of a commit's object; see `Commit`."""

    pointer: Pointer
    shard: str
    rows: Mapping[str, int]
    plain_bytes: Mapping[str, int]

    def require(self, header: Fields) -> None:
        super().require(header)
        if self.rows.keys() != self.plain_bytes.keys():
            header.refuse("declares tables that it does not hold, or lacks some of them")


@dataclass(frozen=True)
class Commit:
    """A commit, stored or carried: read and checked."""

    pointer: Pointer  #: The version that was committed
    #: What the version is made of besides the commit, and in `Lineage.since` the versions whose writes it holds, its
    #: own last
    lineage: Lineage
    #: By table how many rows were written, and how many bytes they have unpacked
    rows: Mapping[str, int]
    plain_bytes: Mapping[str, int]
    size_bytes: int  #: Of the object
    digest: str
    source: str  #: What to call it in an error
    #: The rows by table, as they are stored
    sections: Mapping[str, pa.Buffer] = field(default_factory=dict, repr=False, compare=False)

    @property
    def entry(self) -> ChainEntry:
        """The commit's entry in a chain."""
        return ChainEntry(KIND, self.pointer, self.size_bytes, self.digest, sum(self.plain_bytes.values()))

    def without_rows(self) -> Commit:
        """Return the commit without its sections, which hold on to the whole object."""
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
    """Return the commit in a stored file, checked against shard and pointer. Raises `CorruptionError`."""
    # Sections are as they are, their buffers compressed by Arrow: so they have no more bytes than the object.
    stored = stored_file.decode(data, source=source, kind=KIND, plain_bytes_max=len(data))
    return replace(_commit(stored, shard, pointer, source), sections=stored.sections)


def read_commit_end(read: stored_file.Read, size_bytes: int, shard: str, pointer: Pointer, source: str) -> Commit:
    """Return a commit without its rows, from the end of its object, by `read`; no checksum covers the end."""
    if size_bytes > COMMIT_BYTES_MAX:
        raise CorruptionError(f"{source} is larger than any commit", size_bytes=size_bytes)
    end = stored_file.decode_end(read, size_bytes, source=source, kind=KIND, plain_bytes_max=size_bytes)
    return _commit(end, shard, pointer, source)


def require_intact(read: stored_file.Read, commit: Commit) -> None:
    """Raise `CorruptionError` if a commit's object does not match its end; reads a block at a time."""
    stored_file.require_digest(read, commit.size_bytes, commit.digest, source=commit.source, kind=KIND)


def _commit(
    stored: stored_file.StoredFile | stored_file.StoredEnd, shard: str, pointer: Pointer, source: str
) -> Commit:
    """Return a commit without its rows."""
    header = _Header.read(stored.header, source)
    if (header.pointer, header.shard) != (pointer, shard):
        refuse_stray(source, pointer=header.pointer, shard=header.shard)
    if header.rows.keys() != stored.sections.keys():
        refuse(source, "declares tables that it does not hold, or lacks some of them")
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
    """The commits of one shard. `limit_bytes`: the size of the largest commit."""

    shard: PrefixedStorage
    tables: Mapping[str, TableSchema]
    limit_bytes: int = COMMIT_BYTES_MAX

    def encode(self, pointer: Pointer, lineage: Lineage, runs: Mapping[str, Run]) -> tuple[pa.Buffer, ChainEntry]:
        """Return a commit's bytes and its entry in a chain. Raises `InvalidArgumentError`."""
        plain_bytes = {table: ipc.get_record_batch_size(run.batch) for table, run in runs.items()}
        rows = {table: len(run) for table, run in runs.items()}
        header = {"pointer": str(pointer), "shard": self.shard.prefix, "rows": rows, "plain_bytes": plain_bytes}
        sections = {table: partial(run.write, compression="lz4") for table, run in runs.items()}
        data, digest = stored_file.encode(
            KIND, header | lineage.to_json(), sections, plain_bytes=sum(plain_bytes.values())
        )
        if data.size > self.limit_bytes:
            raise InvalidArgumentError(
                "a micro-batch wrote more to one shard than a commit holds: use more shards, or smaller micro-batches",
                shard=self.shard.prefix,
                size_bytes=data.size,
                limit_bytes=self.limit_bytes,
            )
        return data, ChainEntry(KIND, pointer, data.size, digest, sum(plain_bytes.values()))

    def decode_carried(self, data: bytes, pointer: Pointer) -> Commit:
        """Return a commit that the query's pointer carries; raises the errors of `read_commit`."""
        return read_commit(data, self.shard.prefix, pointer, f"the commit that the query carries as {pointer}")

    def newest(self, pointer: Pointer, carried: bytes | None) -> Commit:
        """Return the commit that the query's pointer names, or carries; raises the errors of `fetch_newest`."""
        return self.fetch_newest(pointer) if carried is None else self.decode_carried(carried, pointer)

    def fetch_newest(self, pointer: Pointer) -> Commit:
        """Fetch the commit that the query's pointer names. Raises `StateLostError`, `CorruptionError`."""
        key = f"commits/{pointer}"
        try:
            data = self.shard.get(key, self.limit_bytes)
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
            data = self.shard.get(entry.key, min(entry.size_bytes, self.limit_bytes))
        except NotFoundError as exc:
            raise CorruptionError(f"{source} is missing, and a later commit builds on it") from exc
        commit = read_commit(data, self.shard.prefix, entry.pointer, source)
        if commit.entry != entry:
            raise CorruptionError(f"{source} is not the object that the commit builds on: it was replaced")
        return commit

    def rows(self, commits: Sequence[Commit], below: Mapping[str, Run], *, drop_deletes: bool) -> dict[str, Run]:
        """Return, by table, the rows of some commits, oldest first, merged over the runs `below` them."""
        self._require_tables_of(commits)
        rows = {}
        for table, schema in self.tables.items():
            runs = [*([below[table]] if table in below else []), *_runs_of(schema, commits)]
            if runs:
                rows[table] = merge_runs(runs, drop_deletes=drop_deletes)
        return rows

    def merged(self, older: Commit, newer: Mapping[str, Run]) -> dict[str, Run]:
        """Return, by table, the writes of a commit and of those after it; raises the errors of `rows`."""
        self._require_tables_of([older])
        merged = {}
        for table, schema in self.tables.items():
            runs = [*_runs_of(schema, [older]), *([newer[table]] if table in newer else [])]
            if runs:
                merged[table] = merge_runs(runs, drop_deletes=False)
        return merged

    def _require_tables_of(self, commits: Sequence[Commit]) -> None:
        """Check that all tables of commits are known: rows of unknown ones would be lost silently."""
        for commit in commits:
            require_declared(commit.sections, self.tables)


def _runs_of(schema: TableSchema, commits: Sequence[Commit]) -> list[Run]:
    return [run for commit in commits if (run := commit.run_of(schema)) is not None]
