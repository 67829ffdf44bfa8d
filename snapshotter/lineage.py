"""What a version is made of: the objects in durable storage, and the versions since the newest of them.

::

    snapshots/20-aa-7c1e… ◀─ commits/21-bb ◀─ commits/23-dd ◀┄ 24-ee ◀┄ 25-ff
    └──────────── chain of 25-ff ────────────────────────┘     └── since ──┘

The commits of 24-ee and 25-ff are **carried**: too small for an object of their own, they travel as one in the row of
the query's pointer. Each commit's header, and each local version's properties, hold this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from holdfast.errors import CorruptionError

_KINDS = ("commit", "snapshot")
POINTER = re.compile(r"(0|[1-9][0-9]{0,18})-[0-9A-Za-z]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SIZE_MAX = 1 << 62


@dataclass(frozen=True)
class ChainEntry:
    """One object that a version is made of.

    Attributes
    ----------
    kind : {"snapshot", "commit"}
    pointer : str
        The version that the object belongs to.
    size_bytes : int
        Of the object; of a snapshot, that of its manifest.
    digest : str
        Of the object's bytes; see `holdfast.backends.stored_file`.
    content_bytes : int
        What comes with the object: of a commit its rows, unpacked; of a snapshot the parts that its manifest names.
    """

    kind: str
    pointer: str
    size_bytes: int
    digest: str
    content_bytes: int = 0

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> ChainEntry:
        """Return the entry that JSON values describe.

        Raises
        ------
        TypeError, ValueError
            They describe none, or name an object that cannot be.
        """
        entry = cls(**values)
        if not (entry.kind in _KINDS and POINTER.fullmatch(entry.pointer) and _DIGEST.fullmatch(entry.digest)):
            raise ValueError(f"an object that cannot be: {ascii(entry)[:160]}")
        if not all(type(size) is int and 0 <= size < _SIZE_MAX for size in (entry.size_bytes, entry.content_bytes)):
            raise ValueError(f"an object of a size that cannot be: {ascii(entry)[:160]}")
        return entry

    @property
    def key(self) -> str:
        """Where the object lies, below the shard."""
        name = f"{self.pointer}-{self.digest[:16]}" if self.kind == "snapshot" else self.pointer
        return f"{self.kind}s/{name}"

    @property
    def version(self) -> int:
        """The number of the version."""
        return int(self.pointer.partition("-")[0])

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects that are read for it."""
        return self.size_bytes + (self.content_bytes if self.kind == "snapshot" else 0)


Chain = list[ChainEntry]


@dataclass(frozen=True)
class Lineage:
    """What a version is made of.

    Attributes
    ----------
    chain : list of ChainEntry
        At most one snapshot, which is the first; then commits, oldest first.
    since : list of str
        Versions since the newest object, oldest first: their commits are carried.
    last : ChainEntry or None
        The newest commit object, also where a snapshot stands for it in the chain. The headers of commits so
        lead back to older ones, and to the snapshots that those build on.
    """

    chain: Chain = field(default_factory=list)
    since: list[str] = field(default_factory=list)
    last: ChainEntry | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any] | None, source: str = "a local version") -> Lineage:
        """Return the lineage that a version's properties or a commit's header hold; an empty one for None.

        Raises
        ------
        CorruptionError
            They hold none; the message calls their place `source`.
        """
        values = values or {}
        try:
            last = values.get("last")
            found = cls(
                [ChainEntry.decode(entry) for entry in values.get("chain", [])],
                list(values.get("since", [])),
                None if last is None else ChainEntry.decode(last),
            )
            found._require_order()
        except (TypeError, ValueError) as exc:
            raise CorruptionError(f"{source} holds no readable chain of commits: {exc}") from exc
        return found

    def _require_order(self) -> None:
        """Raise ValueError or TypeError where the versions do not ascend, which also rules out circles."""
        if any(entry.kind != "commit" for entry in [*self.chain[1:], *([self.last] if self.last else [])]):
            raise ValueError("a snapshot stands among its commits")
        commits = self.commits
        ascend = all(a.version < b.version for a, b in pairwise(commits))
        if not ascend or (self.snapshot and commits and commits[0].version < self.snapshot.version):
            raise ValueError("its versions do not ascend")
        if not all(POINTER.fullmatch(pointer) for pointer in self.since):
            raise ValueError("it names a version that cannot be")

    def to_json(self) -> dict[str, Any]:
        """Return JSON values that `of` reads."""
        return asdict(self)

    @property
    def snapshot(self) -> ChainEntry | None:
        """The snapshot that the version builds on."""
        return self.chain[0] if self.chain and self.chain[0].kind == "snapshot" else None

    @property
    def commits(self) -> Chain:
        """The commit objects since the snapshot."""
        return [entry for entry in self.chain if entry.kind == "commit"]

    def standing_on(self, snapshots: Mapping[str, ChainEntry]) -> Lineage:
        """Return the lineage with the newest of some snapshots, by version, in the place of all that it stands for.

        Carried commits stay as they are: they say what changed since the newest commit object, and so they do on
        top of a snapshot that was made between. So an older snapshot and the commit objects are always as good as
        the newest snapshot.
        """
        for pointer in reversed(self.since):
            if pointer in snapshots:
                return Lineage([snapshots[pointer]], self.since, self.last)
        for i in reversed(range(len(self.chain))):
            entry = self.chain[i]
            if entry.kind == "commit" and entry.pointer in snapshots:
                return Lineage([snapshots[entry.pointer], *self.chain[i + 1 :]], self.since, self.last)
        return self
