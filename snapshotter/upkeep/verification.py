"""Reading every stored object of a shard, and telling what is damaged or missing and which versions that costs.

A version is **whole** if its commit and all that its chain names are there and right. Where only its snapshot is not,
it may still be restored **around** it, from an older snapshot and the commits since, as a restore would do. Otherwise
it is **lost**. What retention has cleaned up is not missing: objects below the version number from which on objects are
needed may be there or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from holdfast.backends import stored_file
from holdfast.errors import CorruptionError, HoldfastError, NotFoundError
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.snapshots.manifest import PART_KIND, Manifest
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.catalogue import (
    CommitHeader,
    Headers,
    ShardListing,
    StoredObject,
    decode_commit,
    decode_manifest,
    links,
    replaced_by,
)
from holdfast.snapshotter.upkeep.retention import History, needed_in_storage


@dataclass(frozen=True)
class Damage:
    """An object that is not what it should be.

    Attributes
    ----------
    key : str
        Below the checkpoint directory.
    problem : str
    lost : tuple of str
        The versions that cannot be restored for it.
    around : tuple of str
        The versions that are restored without it: from an older snapshot and more commits.
    """

    key: str
    problem: str
    lost: tuple[str, ...] = ()
    around: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardReport:
    """What the objects of a shard turned out to be.

    Attributes
    ----------
    shard : str
    objects, size_bytes : int
        What was read.
    versions : int
        Versions with a commit object of their own that can be restored.
    damages : tuple of Damage
    """

    shard: str
    objects: int
    size_bytes: int
    versions: int
    damages: tuple[Damage, ...]


@dataclass(frozen=True)
class _Found:
    """An object as it was read; `problem` where it is damaged."""

    digest: str = ""
    size_bytes: int = 0
    header: CommitHeader | Manifest | None = None
    problem: str | None = None


def verify_shard(
    storage: ObjectStorage,
    listing: ShardListing,
    executor: Executor,
    retained: int,
    on_read: Callable[[int], object] = lambda _size_bytes: None,
) -> ShardReport:
    """Read all objects of a shard.

    Parameters
    ----------
    storage : ObjectStorage
    listing : ShardListing
    executor : concurrent.futures.Executor
        Its threads hold one object each.
    retained : int
        Versions before the newest one that retention keeps: what is older may be missing.
    on_read : callable
        Called with the size of each object when it was read, in the calling thread.

    Raises
    ------
    InvalidArgumentError, UnavailableError
        An object cannot be read now; that says nothing about it.
    """
    wanted = listing.of_kind("commit", "snapshot", "part")
    found: dict[str, _Found] = {}
    for stored, read in zip(wanted, executor.map(partial(_read, storage, listing.prefix), wanted), strict=True):
        on_read(stored.size_bytes)
        if read is not None:
            found[stored.key] = read
    shard = _VerifiedShard(listing, found, _floor(storage, listing, found, retained))
    damages = shard.damages()
    whole = sum(shard.outcome(header) != "lost" for header in shard.commits())
    return ShardReport(listing.prefix, len(found), sum(f.size_bytes for f in found.values()), whole, tuple(damages))


def _read(storage: ObjectStorage, prefix: str, stored: StoredObject) -> _Found | None:
    """Return an object; None where it has gone since the listing."""
    source = f"{storage.url}/{prefix}/{stored.key}"
    try:
        data = storage.get(f"{prefix}/{stored.key}")
        if stored.kind == "commit":
            header = decode_commit(storage, prefix, stored.key, data)
            return _Found(header.digest, len(data), header)
        if stored.kind == "snapshot":
            return _Found(stored.key.rpartition("-")[2], len(data), decode_manifest(storage, prefix, stored.key, data))
        return _Found(stored_file.decode(data, source=source, kind=PART_KIND).digest, len(data))
    except NotFoundError:
        return None
    except CorruptionError as exc:
        return _Found(problem=str(exc).removeprefix(f"{source} "), size_bytes=stored.size_bytes)


def _floor(storage: ObjectStorage, listing: ShardListing, found: dict[str, _Found], retained: int) -> int:
    """Return the version number below which objects may be missing."""
    headers = Headers(storage, listing.prefix)
    for key, read in found.items():
        if read.header is not None:
            headers.remember(key, read.header)
    try:
        return max(listing.first_version, needed_in_storage(retained, History(listing, headers)))
    except HoldfastError:  # damage, which is told for itself
        return listing.first_version


class _VerifiedShard:
    """What was read, and what follows from it."""

    def __init__(self, listing: ShardListing, found: dict[str, _Found], floor: int) -> None:
        self._prefix = listing.prefix
        self._found = found
        self._floor = floor
        self._outcomes: dict[str, str] = {}

    def commits(self) -> Iterator[CommitHeader]:
        """Yield the commits that can be read, and whose chains are not cleaned up already."""
        for found in self._found.values():
            if isinstance(found.header, CommitHeader) and not self._is_past(found.header):
                yield found.header

    def _is_past(self, header: CommitHeader) -> bool:
        gone = [e for e in header.chain if e.key not in self._found or self._has_lost_parts(self._found[e.key].header)]
        return any(link.version < self._floor for link in links(gone))

    def _has_lost_parts(self, header: CommitHeader | Manifest | None) -> bool:
        files = header.files if isinstance(header, Manifest) else ()
        return any(part.key not in self._found for file in files for part in file.parts)

    def outcome(self, header: CommitHeader) -> str:
        """Return whether a version is "whole", restored "around" a damaged snapshot, or "lost"."""
        key = str(header.pointer)
        if key not in self._outcomes:
            self._outcomes[key] = self._find_outcome(header)
        return self._outcomes[key]

    def _find_outcome(self, header: CommitHeader) -> str:
        commits = [e for e in header.chain if e.kind == "commit"]
        if any(self._problem_of(e) for e in commits):
            return "lost"
        if not any(self._problems_of_snapshot(e) for e in header.chain if e.kind == "snapshot"):
            return "whole"
        oldest = self._found[commits[0].key].header if commits else header
        assert isinstance(oldest, CommitHeader)
        if oldest.last is None:
            return "around"
        before = self._found.get(oldest.last.key)
        if self._problem_of(oldest.last) or before is None or not isinstance(before.header, CommitHeader):
            return "lost"
        return "lost" if self.outcome(before.header) == "lost" else "around"

    def _problem_of(self, entry: ChainEntry) -> str | None:
        found = self._found.get(entry.key)
        if found is None:
            return "is missing"
        if found.problem is None and not entry.digest.startswith(found.digest):
            return "is not the object that later ones build on: it was replaced"
        return found.problem

    def _problems_of_snapshot(self, entry: ChainEntry) -> dict[str, str]:
        """Return by key what is wrong with a snapshot's manifest or the parts that it names."""
        problem = self._problem_of(entry)
        if problem:
            return {entry.key: problem}
        manifest = self._found[entry.key].header
        assert isinstance(manifest, Manifest)
        return self._problems_of_parts(manifest)

    def _problems_of_parts(self, manifest: Manifest) -> dict[str, str]:
        problems = {}
        for part in (part for file in manifest.files for part in file.parts):
            found = self._found.get(part.key)
            if found is None:
                problems[part.key] = "is missing"
            elif found.problem:
                problems[part.key] = found.problem
            elif (found.digest, found.size_bytes) != (part.digest, part.size_bytes):
                problems[part.key] = "is not the part that a snapshot names: it was replaced"
        return problems

    def damages(self) -> list[Damage]:
        """Return all that is wrong, with the versions that it costs."""
        problems = {key: found.problem for key, found in self._found.items() if found.problem}
        costs: dict[str, list[CommitHeader]] = {key: [] for key in problems}
        for found in self._found.values():
            manifest = found.header
            if isinstance(manifest, Manifest) and manifest.pointer.version >= self._floor:
                problems |= self._problems_of_parts(manifest)
                problems |= self._missing(replaced_by(manifest))
        for header in self.commits():
            for entry in header.chain:
                wrong = self._problems_of_snapshot(entry) if entry.kind == "snapshot" else {}
                wrong |= {entry.key: problem} if (problem := self._problem_of(entry)) else {}
                problems |= wrong
                for key in wrong:
                    costs.setdefault(key, []).append(header)
        return [self._damage(key, problems[key] or "", costs.get(key, [])) for key in sorted(problems)]

    def _missing(self, chain: tuple[ChainEntry, ...]) -> dict[str, str]:
        """Return the objects of a chain that are missing, or not the ones it names, and were not cleaned up."""
        recent = [e for e, link in zip(chain, links(chain), strict=True) if link.version >= self._floor]
        return {e.key: problem for e in recent if (problem := self._problem_of(e))}

    def _damage(self, key: str, problem: str, costs: list[CommitHeader]) -> Damage:
        costs = sorted(costs, key=lambda header: header.pointer)
        lost = [str(header.pointer) for header in costs if self.outcome(header) == "lost"]
        if key.startswith("commits/"):
            lost.insert(0, key.removeprefix("commits/"))
        around = [str(header.pointer) for header in costs if self.outcome(header) == "around"]
        return Damage(f"{self._prefix}/{key}", problem, tuple(lost), tuple(around))
