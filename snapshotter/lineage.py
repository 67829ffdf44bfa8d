"""What a version is made of: the objects in durable storage, and the versions since the newest of them.

::

    snapshots/20-aa-7c1e… ◀─ commits/21-bb ◀─ commits/23-dd ◀┄ 24-ee ◀┄ 25-ff
    └──────────── chain of 25-ff ────────────────────────┘     └── since ──┘

The commits of 24-ee and 25-ff are **carried**: too small for an object of their own, they travel as one in the row of
the query's pointer. Each commit's header, and each local version's properties, hold this.

Invariants
----------
* **ascending**: versions ascend along the chain, and the newest commit object lies below all that came since. So
  following a lineage back terminates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from holdfast.backends.base import Pointer
from holdfast.snapshotter.fields import DIGEST, Fields

_KIND = re.compile("commit|snapshot")


@dataclass(frozen=True)
class ChainEntry:
    """One object that a version is made of."""

    kind: str
    pointer: Pointer  #: The version that the object belongs to
    size_bytes: int  #: Of the object; of a snapshot, that of its manifest
    digest: str  #: Of the object's bytes; see `holdfast.backends.stored_file`
    #: What is read with the object: a commit's rows, unpacked; the parts that a snapshot's manifest names
    content_bytes: int = 0

    #: The fields of its JSON.
    FIELDS = ("kind", "pointer", "size_bytes", "digest", "content_bytes")

    @classmethod
    def read(cls, fields: Fields) -> ChainEntry:
        """Return the entry that the fields describe; raises `CorruptionError`."""
        return cls(
            fields.text("kind", _KIND),
            fields.pointer("pointer"),
            fields.number("size_bytes"),
            fields.text("digest", DIGEST),
            fields.number("content_bytes"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values that `read` reads."""
        return {name: getattr(self, name) for name in self.FIELDS} | {"pointer": str(self.pointer)}

    @property
    def key(self) -> str:
        """The object's key below the shard."""
        name = f"{self.pointer}-{self.digest[:16]}" if self.kind == "snapshot" else self.pointer
        return f"{self.kind}s/{name}"

    @property
    def version(self) -> int:
        """The number of the version."""
        return self.pointer.version

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects that a restore reads."""
        return self.size_bytes + (self.content_bytes if self.kind == "snapshot" else 0)


Chain = tuple[ChainEntry, ...]


def read_chain(fields: Fields, name: str) -> Chain:
    """Return the chain in a field: at most one snapshot, first; then commits of ascending versions.

    Raises `CorruptionError` if it holds none.
    """
    chain = tuple(ChainEntry.read(entry) for entry in fields.each(name, *ChainEntry.FIELDS))
    if any(entry.kind != "commit" for entry in chain[1:]):
        fields.refuse("names a snapshot among its commits")
    for older, newer in pairwise(chain):
        # A snapshot may be of an attempt at the version that its first commit belongs to.
        if older.version > newer.version or (older.version == newer.version and older.kind == "commit"):
            fields.refuse("is made of versions that do not ascend", older=older.pointer, newer=newer.pointer)
    return chain


@dataclass(frozen=True)
class Lineage:
    """What a version is made of."""

    chain: Chain = ()  #: At most one snapshot, which is the first; then commits, oldest first
    since: tuple[Pointer, ...] = ()  #: Versions since the newest object, oldest first: their commits are carried
    #: The newest commit object, also where a snapshot stands for it in the chain. The headers of commits so lead back
    #: to older ones, and to the snapshots that those build on.
    last: ChainEntry | None = None

    #: The fields of its JSON.
    FIELDS = ("chain", "since", "last")

    @classmethod
    def of(cls, properties: Mapping[str, Any] | None) -> Lineage:
        """Return the lineage in a local version's properties, or an empty one.

        Raises `CorruptionError` if they hold something else.
        """
        return cls.read(Fields(properties, "a local version", *cls.FIELDS)) if properties else cls()

    @classmethod
    def read(cls, fields: Fields) -> Lineage:
        """Return the lineage that the fields describe.

        Raises `CorruptionError` if they describe none, or one that does not ascend.
        """
        last = fields.inner_or_none("last", *ChainEntry.FIELDS)
        found = cls(
            read_chain(fields, "chain"), fields.pointers("since"), None if last is None else ChainEntry.read(last)
        )
        found._require_order(fields)
        return found

    def _require_order(self, fields: Fields) -> None:
        last, commits = self.last, self.commits
        if last is not None and last.kind != "commit":
            fields.refuse("follows a snapshot instead of a commit", pointer=last.pointer)
        if commits and last != commits[-1]:
            fields.refuse("follows another commit than the last one of its chain")
        if not commits and last is not None and self.snapshot is not None and last.version > self.snapshot.version:
            fields.refuse("builds on a snapshot that is older than the commit it follows", pointer=last.pointer)
        versions = [*([last.version] if last else []), *(pointer.version for pointer in self.since)]
        if any(newer <= older for older, newer in pairwise(versions)):
            fields.refuse("holds versions that do not ascend")

    def to_json(self) -> dict[str, Any]:
        """Return JSON values that `read` reads."""
        return {
            "chain": [entry.to_json() for entry in self.chain],
            "since": [str(pointer) for pointer in self.since],
            "last": None if self.last is None else self.last.to_json(),
        }

    @property
    def snapshot(self) -> ChainEntry | None:
        """The snapshot that the version builds on."""
        return self.chain[0] if self.chain and self.chain[0].kind == "snapshot" else None

    @property
    def commits(self) -> Chain:
        """The commit objects since the snapshot."""
        return self.chain[1:] if self.snapshot else self.chain

    @property
    def versions(self) -> set[Pointer]:
        """All versions named after the snapshot's: any of them may have a newer snapshot by now."""
        named = {*self.since, *(entry.pointer for entry in self.commits)}
        return named if self.snapshot is None else {p for p in named if p.version > self.snapshot.version}

    def behind(self, version: int) -> int:
        """Return how many versions the snapshot is behind `version`, which builds on this lineage.

        Without a snapshot, those since the oldest that the lineage names, and that one.
        """
        if self.snapshot is not None:
            return version - self.snapshot.version
        oldest = min((pointer.version for pointer in self.versions), default=version)
        return version - oldest + 1

    def standing_on(self, snapshots: Mapping[Pointer, ChainEntry]) -> Lineage:
        """Return the lineage with the newest of some snapshots, by version, in place of the objects that it replaces.

        Carried commits stay as they are: they say what changed since the newest commit object, and so they do on
        top of a snapshot that was made between. So an older snapshot and the commit objects are always as good as
        the newest snapshot.
        """
        for pointer in reversed(self.since):
            if pointer in snapshots:
                return Lineage((snapshots[pointer],), self.since, self.last)
        for i in reversed(range(len(self.chain))):
            entry = self.chain[i]
            if entry.kind == "commit" and entry.pointer in snapshots:
                return Lineage((snapshots[entry.pointer], *self.chain[i + 1 :]), self.since, self.last)
        return self
