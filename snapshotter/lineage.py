"""The lineage of a version: its objects in durable storage, and the versions since the newest object.

::

    snapshots/20-aa-7c1e… ◀─ commits/21-bb ◀─ commits/23-dd ◀┄ 24-ee ◀┄ 25-ff
    └──────────── chain of 25-ff ────────────────────────┘     └── since ──┘

The commits of 24-ee and 25-ff are **carried**: too small for an object, they travel together in the row of the query's
pointer. Each commit's header and each local version's properties hold the lineage.

Invariants
----------
* **ascending**: versions ascend along the chain, and the newest commit object is older than all versions in `since`. So
  following a lineage back terminates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from holdfast.backends.base import Pointer
from holdfast.snapshotter.fields import Digest, Fields, Stored


@dataclass(frozen=True)
class ChainEntry(Stored):
    """One object of a version."""

    kind: Annotated[str, re.compile("commit|snapshot")]
    pointer: Pointer  #: The version that the object belongs to
    size_bytes: int  #: Size of the object; for a snapshot, of its manifest
    digest: Digest  #: Digest of the object's bytes; see `holdfast.backends.stored_file`
    #: Size of the content: a commit's rows, uncompressed, or the parts that a snapshot's manifest names
    content_bytes: int = 0

    @property
    def key(self) -> str:
        """The object's key below the shard."""
        name = f"{self.pointer}-{self.digest[:16]}" if self.kind == "snapshot" else self.pointer
        return f"{self.kind}s/{name}"

    @property
    def version(self) -> int:
        return self.pointer.version

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects that a restore reads."""
        return self.size_bytes + (self.content_bytes if self.kind == "snapshot" else 0)


Chain = tuple[ChainEntry, ...]


def require_chain(chain: Chain, header: Fields) -> None:
    """Refuse a chain unless it consists of at most one snapshot, then commits with ascending versions."""
    if any(entry.kind != "commit" for entry in chain[1:]):
        header.refuse("names a snapshot among its commits")
    for older, newer in pairwise(chain):
        # A snapshot may belong to an attempt at the same version as its first commit.
        if older.version > newer.version or (older.version == newer.version and older.kind == "commit"):
            header.refuse("has versions that do not ascend", older=older.pointer, newer=newer.pointer)


@dataclass(frozen=True)
class Lineage(Stored):
    """The objects and the carried commits that make up a version."""

    chain: Chain = ()  #: At most one snapshot, which is the first; then commits, oldest first
    since: tuple[Pointer, ...] = ()  #: Versions since the newest object, oldest first: their commits are carried
    #: The newest commit object, even if a snapshot replaces it in the chain: each commit's header names the one before
    #: and the snapshot that it builds on
    last: ChainEntry | None = None

    @classmethod
    def of(cls, properties: Mapping[str, Any] | None) -> Lineage:
        """Return the lineage in a local version's properties, or an empty one. Raises `CorruptionError`."""
        return cls.read(properties, "a local version") if properties else cls()

    def require(self, header: Fields) -> None:
        require_chain(self.chain, header)
        last, commits = self.last, self.commits
        if last is not None and last.kind != "commit":
            header.refuse("follows a snapshot instead of a commit", pointer=last.pointer)
        if commits and last != commits[-1]:
            header.refuse("follows a different commit than the last one of its chain")
        if not commits and last is not None and self.snapshot is not None and last.version > self.snapshot.version:
            header.refuse("builds on a snapshot that is older than the commit it follows", pointer=last.pointer)
        versions = [*([last.version] if last else []), *(pointer.version for pointer in self.since)]
        if any(newer <= older for older, newer in pairwise(versions)):
            header.refuse("holds versions that do not ascend")

    @property
    def snapshot(self) -> ChainEntry | None:
        return self.chain[0] if self.chain and self.chain[0].kind == "snapshot" else None

    @property
    def commits(self) -> Chain:
        return self.chain[1:] if self.snapshot else self.chain

    @property
    def versions(self) -> set[Pointer]:
        """The versions after the snapshot, any of which may have a newer snapshot by now."""
        named = {*self.since, *(entry.pointer for entry in self.commits)}
        return named if self.snapshot is None else {p for p in named if p.version > self.snapshot.version}

    def behind(self, version: int) -> int:
        """Return how many versions the snapshot, or else the oldest version, is behind `version`."""
        if self.snapshot is not None:
            return version - self.snapshot.version
        oldest = min((pointer.version for pointer in self.versions), default=version)
        return version - oldest + 1

    def with_snapshots(self, snapshots: Mapping[Pointer, ChainEntry]) -> Lineage:
        """Return the lineage with the newest of `snapshots` in place of the objects that it replaces."""
        for pointer in reversed(self.since):
            if pointer in snapshots:
                return Lineage((snapshots[pointer],), self.since, self.last)
        for i in reversed(range(len(self.chain))):
            entry = self.chain[i]
            if entry.kind == "commit" and entry.pointer in snapshots:
                return Lineage((snapshots[entry.pointer], *self.chain[i + 1 :]), self.since, self.last)
        return self
