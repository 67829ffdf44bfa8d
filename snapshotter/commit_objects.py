"""Commits as stored files: made, fetched, checked and read.

A commit's header declares how many bytes its rows have when they are unpacked, and so does the chain of each version
that builds on it. Nothing larger is ever asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.ipc as ipc

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.run import Run, TableSchema, merge_runs
from holdfast.errors import CorruptionError, NotFoundError, StateLostError
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.storage.object_storage import ObjectStorage

KIND = "commit"


@dataclass(frozen=True)
class CommitObjects:
    """The commits of one shard.

    Parameters
    ----------
    storage : ObjectStorage
    shard : str
        The shard's place in the storage.
    tables : mapping of str to TableSchema
    """

    storage: ObjectStorage
    shard: str
    tables: Mapping[str, TableSchema]

    def encode(self, pointer: Pointer, lineage: Lineage, runs: Mapping[str, Run]) -> tuple[pa.Buffer, ChainEntry]:
        """Return a commit's bytes, and what names it in a chain."""
        plain_bytes = {table: ipc.get_record_batch_size(run.batch) for table, run in runs.items()}
        header = {
            "pointer": str(pointer),
            "shard": self.shard,
            "rows": {table: len(run) for table, run in runs.items()},
            "plain_bytes": plain_bytes,
            **lineage.to_json(),
        }
        sections = {table: partial(run.write, compression="lz4") for table, run in runs.items()}
        data, digest = stored_file.encode(KIND, header, sections)
        return data, ChainEntry(KIND, str(pointer), data.size, digest, sum(plain_bytes.values()))

    def entry_of(self, pointer: Pointer, commit: stored_file.StoredFile) -> ChainEntry:
        """Return what names a commit in a chain."""
        content_bytes = sum(self._plain_bytes(commit).values())
        return ChainEntry(KIND, str(pointer), commit.size_bytes, commit.digest, content_bytes)

    def lineage_of(self, commit: stored_file.StoredFile) -> Lineage:
        """Return what a commit says that it builds on."""
        return Lineage.of(commit.header, self._source_of(commit))

    def fetch_newest(self, pointer: Pointer) -> stored_file.StoredFile:
        """Fetch the commit that the query's pointer names.

        Raises
        ------
        StateLostError
            It is not there.
        CorruptionError
            It is damaged, or belongs elsewhere.
        """
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
        return self.decode(data, pointer, f"{self.storage.url}/{path}")

    def fetch(self, entry: ChainEntry) -> stored_file.StoredFile:
        """Fetch a commit that a chain names.

        Raises
        ------
        CorruptionError
            It is missing, damaged, or not the one that the chain names.
        """
        source = f"{self.storage.url}/{self.shard}/{entry.key}"
        try:
            data = self.storage.get(f"{self.shard}/{entry.key}")
        except NotFoundError as exc:
            raise CorruptionError(f"{source} is missing, and a later commit builds on it") from exc
        pointer = Pointer.parse(entry.pointer)
        commit = self.decode(data, pointer, source)
        if self.entry_of(pointer, commit) != entry:
            raise CorruptionError(f"{source} is not the object that the commit builds on: it was replaced")
        return commit

    def decode(self, data: bytes | memoryview, pointer: Pointer, source: str) -> stored_file.StoredFile:
        """Return a commit; a `CorruptionError` says that it is damaged, or belongs elsewhere."""
        stored = stored_file.decode(data, source=source, kind=KIND)
        if stored.header.get("pointer") != str(pointer) or stored.header.get("shard") != self.shard:
            raise CorruptionError(
                f"{source} belongs elsewhere: it was moved or copied",
                pointer=stored.header.get("pointer"),
                shard=stored.header.get("shard"),
            )
        return stored

    def rows(
        self, commits: Sequence[stored_file.StoredFile], below: Mapping[str, Run], *, drop_deletes: bool
    ) -> dict[str, Run]:
        """Return by table what some commits, oldest first, have written over the runs `below` them."""
        rows = {}
        for table in self.tables:
            runs = [*([below[table]] if table in below else []), *self._runs_of(table, commits)]
            if runs:
                rows[table] = merge_runs(runs, drop_deletes=drop_deletes)
        return rows

    def merged(self, older: stored_file.StoredFile, newer: Mapping[str, Run]) -> dict[str, Run]:
        """Return by table what a commit and the writes after it have written."""
        merged = {}
        for table in self.tables:
            runs = [*self._runs_of(table, [older]), *([newer[table]] if table in newer else [])]
            if runs:
                merged[table] = merge_runs(runs, drop_deletes=False)
        return merged

    def _runs_of(self, table: str, commits: Sequence[stored_file.StoredFile]) -> list[Run]:
        return [
            Run.read(
                commit.sections[table],
                self.tables[table],
                source=self._source_of(commit),
                plain_bytes=self._plain_bytes(commit).get(table, 0),
            )
            for commit in commits
            if table in commit.sections
        ]

    def _plain_bytes(self, commit: stored_file.StoredFile) -> Mapping[str, int]:
        """Return how many bytes the rows of each table have, unpacked, as the header declares."""
        declared = commit.header.get("plain_bytes")
        sizes = declared.values() if isinstance(declared, dict) else [None]
        if not isinstance(declared, dict) or any(type(size) is not int or size < 0 for size in sizes):
            raise CorruptionError(f"{self._source_of(commit)} does not declare how large its rows are")
        limit = commit.size_bytes * stored_file.EXPANSION_MAX
        if sum(declared.values()) > limit:
            raise CorruptionError(f"{self._source_of(commit)} declares more bytes than it can hold", most=limit)
        return declared

    def _source_of(self, commit: stored_file.StoredFile) -> str:
        return f"{self.storage.url}/{self.shard}/commits/{commit.header.get('pointer')}"
