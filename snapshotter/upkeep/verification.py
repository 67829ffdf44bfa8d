"""Reads every stored object of a shard; finds damaged and missing objects, and the versions that need them.

A version is **whole** if its commit and everything in its chain is intact. If only its snapshot is damaged, the version
may still be restored **around** it, from an older snapshot and the commits since then. Otherwise it is **lost**.
Objects below the lowest needed version number do not count as missing, because a clean-up may have deleted them.

The query may write and clean up meanwhile: after finding a problem, `verify_shard` lists and reads the shard again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, HoldfastError, NotFoundError
from holdfast.snapshotter.commits import Commit
from holdfast.snapshotter.lineage import Chain, ChainEntry, Lineage
from holdfast.snapshotter.snapshots import PART_OBJECT_BYTES_MAX, Manifest, read_part
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import (
    Headers,
    ShardListing,
    StoredObject,
    list_shard,
    read_header,
    require_whole,
)
from holdfast.snapshotter.upkeep.retention import History, needed_in_storage

_READS_AHEAD = 1_000
# Each pass reads only damaged objects, and those stored since the previous pass, so it takes less time.
_PASSES = 3
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Damage:
    """A damaged or missing object."""

    key: str  #: Key below the state directory
    problem: str
    lost: tuple[str, ...] = ()  #: The versions that cannot be restored without the object
    around: tuple[str, ...] = ()  #: The versions that can be restored without it, from an older snapshot and commits


@dataclass(frozen=True)
class ShardReport:
    """The result of verifying a shard."""

    #: Number and size of the objects read
    objects: int
    size_bytes: int
    versions: int  #: Restorable versions that have a commit object
    damages: tuple[Damage, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """An object as read: a commit or manifest with its chain entry, or a part; `problem` describes its damage."""

    size_bytes: int
    header: Commit | Manifest | None = None
    entry: ChainEntry | None = None
    part_digest: str = ""
    problem: str | None = None


def verify_shard(
    shard: PrefixedStorage,
    executor: Executor,
    retained: int,
    on_read: Callable[[int], object] = lambda _size_bytes: None,
) -> ShardReport:
    """Read all objects of a shard, to which a query may be writing, and report damage."""
    found: dict[str, _Found] = {}
    interned = _Interned()
    passes = 0
    while True:
        passes += 1
        listing = list_shard(shard)
        found = {key: one for key, one in found.items() if key in listing.objects and not one.problem}
        _read_new(shard, listing, executor, interned, found, on_read)
        verified = _VerifiedShard(listing, found, _floor(shard, listing, found, retained))
        damages = verified.damages()
        if not damages or passes == _PASSES:
            size_bytes = sum(one.size_bytes for one in found.values())
            whole = sum(verified.outcomes[commit.pointer] != "lost" for commit in verified.commits)
            return ShardReport(len(found), size_bytes, whole, tuple(damages))


def _read_new(
    shard: PrefixedStorage,
    listing: ShardListing,
    executor: Executor,
    interned: _Interned,
    found: dict[str, _Found],
    on_read: Callable[[int], object],
) -> None:
    """Read listed objects that are not yet in `found`, and add them there."""
    # Manifests before parts, because manifests give the sizes of parts.
    for kind in ("commit", "snapshot", "part"):
        new = [stored for stored in listing.of_kind(kind) if stored.key not in found]
        read = partial(_read, shard, interned, _sizes_of_parts(found) if kind == "part" else {})
        for stored, one in zip(new, ahead(executor, read, new, window=_READS_AHEAD), strict=True):
            on_read(stored.size_bytes)
            if one is not None:
                found[stored.key] = one


def _sizes_of_parts(found: Mapping[str, _Found]) -> dict[str, int]:
    """Return, by key, how many bytes of a file each part holds."""
    manifests = [one.header for one in found.values() if isinstance(one.header, Manifest)]
    return {
        part.key: size_bytes
        for manifest in manifests
        for file in manifest.files
        for part, size_bytes in file.sizes_of_parts(manifest.part_bytes)
    }


class _Interned:
    """Keeps one of several equal values, to save memory. Threads: any."""

    def __init__(self) -> None:
        self._known: dict[object, object] = {}

    def each(self, values: Iterable[_Value]) -> tuple[_Value, ...]:
        return tuple(self._known.setdefault(value, value) for value in values)  # type: ignore[misc]  # they are equal

    def header(self, header: Commit | Manifest) -> Commit | Manifest:
        """Return only the parts of a header that verification needs."""
        if isinstance(header, Manifest):
            return replace(header, files=self.each(header.files), replaced=self.each(header.replaced))
        last = header.lineage.last
        lineage = Lineage(self.each(header.lineage.chain), (), self.each([last])[0] if last else None)
        return replace(header, lineage=lineage, rows={}, plain_bytes={}, source="")


def _read(shard: PrefixedStorage, interned: _Interned, sizes: Mapping[str, int], stored: StoredObject) -> _Found | None:
    """Read an object; return None if it vanished since the listing."""
    source = f"{shard.url}/{stored.key}"
    try:
        if stored.kind == "part":
            data = shard.get(stored.key, PART_OBJECT_BYTES_MAX)
            part = read_part(data, shard.prefix, source, plain_bytes=sizes.get(stored.key))
            return _Found(len(data), part_digest=part.digest)
        header, entry = read_header(shard, stored)
        require_whole(shard, stored, header)
        return _Found(entry.size_bytes, interned.header(header), interned.each([entry])[0])
    except NotFoundError:
        return None
    except CorruptionError as exc:
        return _Found(stored.size_bytes, problem=str(exc).removeprefix(f"{source} "))


def _floor(shard: PrefixedStorage, listing: ShardListing, found: Mapping[str, _Found], retained: int) -> int:
    """Return the version number below which objects may be missing."""
    headers = Headers(shard, {key: one.header for key, one in found.items() if one.header is not None})
    try:
        return max(listing.first_version, needed_in_storage(retained, History(listing, headers)))
    except HoldfastError:  # damage, which is reported separately
        return listing.first_version


class _VerifiedShard:
    def __init__(self, listing: ShardListing, found: dict[str, _Found], floor: int) -> None:
        self._prefix = listing.prefix
        self._found = found
        self._floor = floor
        self.outcomes: dict[Pointer, str] = {}
        commits = [one.header for one in found.values() if isinstance(one.header, Commit)]
        for commit in sorted(commits, key=lambda commit: commit.pointer):
            self.outcomes[commit.pointer] = self._outcome(commit)
        #: Commits whose chains have not been cleaned up.
        self.commits = [commit for commit in commits if not self._is_past(commit)]

    def _is_past(self, header: Commit) -> bool:
        chain = header.lineage.chain
        gone = [e for e in chain if e.key not in self._found or self._has_lost_parts(self._found[e.key].header)]
        return any(entry.version < self._floor for entry in gone)

    def _has_lost_parts(self, header: Commit | Manifest | None) -> bool:
        files = header.files if isinstance(header, Manifest) else ()
        return any(part.key not in self._found for file in files for part in file.parts)

    def _outcome(self, commit: Commit) -> str:
        """Return "whole", "around" (a damaged snapshot) or "lost"; requires the outcomes of older versions."""
        commits, snapshot = commit.lineage.commits, commit.lineage.snapshot
        if any(self._problem_of(entry) for entry in commits):
            return "lost"
        if snapshot is None or not self._problems_of_snapshot(snapshot):
            return "whole"
        oldest = self._found[commits[0].key].header if commits else commit
        assert isinstance(oldest, Commit)
        last = oldest.lineage.last
        if last is None:
            return "around"
        is_lost = self._problem_of(last) or self.outcomes[last.pointer] == "lost"
        return "lost" if is_lost else "around"

    def _problem_of(self, entry: ChainEntry) -> str | None:
        found = self._found.get(entry.key)
        if found is None:
            return "is missing"
        if found.problem is None and found.entry != entry:
            return "is not the object that later objects build on: it was replaced"
        return found.problem

    def _problems_of_snapshot(self, entry: ChainEntry) -> dict[str, str]:
        """Return, by key, the problems of a snapshot's manifest and parts."""
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
            elif (found.part_digest, found.size_bytes) != (part.digest, part.size_bytes):
                problems[part.key] = "is not the part that a snapshot names: it was replaced"
        return problems

    def damages(self) -> list[Damage]:
        """Return all damage, with the affected versions."""
        problems = {key: found.problem for key, found in self._found.items() if found.problem}
        costs: dict[str, list[Commit]] = {key: [] for key in problems}
        for found in self._found.values():
            manifest = found.header
            if isinstance(manifest, Manifest) and manifest.pointer.version >= self._floor:
                problems |= self._problems_of_parts(manifest)
                problems |= self._missing(manifest.replaced)
        for header in self.commits:
            for entry in header.lineage.chain:
                wrong = self._problems_of_snapshot(entry) if entry.kind == "snapshot" else {}
                wrong |= {entry.key: problem} if (problem := self._problem_of(entry)) else {}
                problems |= wrong
                for key in wrong:
                    costs.setdefault(key, []).append(header)
        return [self._damage(key, problems[key] or "", costs.get(key, [])) for key in sorted(problems)]

    def _missing(self, chain: Chain) -> dict[str, str]:
        """Return, by key, the problems of a chain's objects above the floor."""
        recent = [entry for entry in chain if entry.version >= self._floor]
        return {e.key: problem for e in recent if (problem := self._problem_of(e))}

    def _damage(self, key: str, problem: str, costs: list[Commit]) -> Damage:
        costs = sorted(costs, key=lambda header: header.pointer)
        lost = [str(header.pointer) for header in costs if self.outcomes[header.pointer] == "lost"]
        if key.startswith("commits/"):
            lost.insert(0, key.removeprefix("commits/"))
        around = [str(header.pointer) for header in costs if self.outcomes[header.pointer] == "around"]
        return Damage(f"{self._prefix}/{key}", problem, tuple(lost), tuple(around))
