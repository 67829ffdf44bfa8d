"""Catalogue of a state directory: every object and its kind.

::

    <operator>/operator                             "operator": the directory's owner
    <operator>/probes/…   claims/…                  "probe"; see `holdfast.snapshotter.ownership.claims`
    <operator>/schemas/…                            the tables' columns
    <operator>/shard-0003/commits/17-9f3c…          "commit"
                          snapshots/16-aa…-7c1e…    "snapshot"
                          files/5f0c1d…-0           "part"
                          probes/…                  "probe"
                          troubles/snapshot-3e…     "trouble": see `holdfast.snapshotter.upkeep.troubles`
    _queries/…  _rescaling/<query id>/…             not an operator: see `holdfast.snapshotter.ownership.queries`
    _sinks/<sink>/<number>                          not an operator: see `holdfast.snapshotter.sink_log`
    anything else                                   "unknown"

Any name that holdfast does not write is "unknown", and a folder without a record is no operator.

The size of a shard's state is the size of the objects that a restore of the newest version reads::

    snapshot 20   snapshot 40   commit 41   commit 42
    older: kept     └───── state: the parts in its manifest, and the commits stored since ─────┘

Only a manifest lists its snapshot's parts. With many shards, the manifests of evenly spaced shards are read; the sizes
of the others are estimated from their stored bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import MappingProxyType

from holdfast.backends.base import Pointer
from holdfast.backends.options import did_you_mean
from holdfast.backends.stored_file import NOTICE_BYTES_MAX
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.snapshotter.commits import Commit, read_commit, read_commit_end, require_intact
from holdfast.snapshotter.fence import newest_among
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.ownership.claims import FOLDER as CLAIMS
from holdfast.snapshotter.ownership.claims import Beside
from holdfast.snapshotter.ownership.queries import FOLDER as QUERIES
from holdfast.snapshotter.ownership.queries import RESCALING
from holdfast.snapshotter.sink_log import StoredSink, parse_key, stored_sinks
from holdfast.snapshotter.snapshots import PART_NAME, Manifest, read_manifest
from holdfast.snapshotter.storage.object_storage import ObjectInfo, ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.troubles import NAME as TROUBLE_NAME

_SHARD = re.compile(r"shard-([0-9]{4}|[1-9][0-9]{4,8})")
_RESCALED = re.compile(rf"({RESCALING}/[0-9a-f-]{{36}})/(savepoint|(?:sources|operators)/.+)")
#: Key of a savepoint's manifest, below the savepoint.
_MANIFEST = "savepoint"
#: Objects that a query stores for an operator before its record.
_BEGUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]*/(probes|claims|schemas|shard-[0-9]+/troubles)/.+")
_SNAPSHOT = re.compile(r"(.+)-[0-9a-f]{16}")
SHARDS_READ_MAX = 32
_KNOWN_MAX = 100_000


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a shard."""

    key: str  #: Key below the shard: ``commits/17-9f3c``
    kind: str
    pointer: Pointer | None  #: The version of a commit or snapshot
    size_bytes: int
    modified_ms: int  #: When it was stored, by the store's clock, in ms since 1970

    @property
    def version(self) -> int:
        """The version number of a commit or snapshot; 0 for other objects."""
        return self.pointer.version if self.pointer else 0


@dataclass(frozen=True)
class ShardListing:
    """The objects of a shard, as found in one listing."""

    prefix: str  #: Prefix of the shard's objects: ``totals/shard-0003``
    objects: Mapping[str, StoredObject]  #: By key below the shard

    def of_kind(self, *kinds: str) -> list[StoredObject]:
        """Return the objects of the given kinds, oldest version first."""
        found = [o for o in self.objects.values() if o.kind in kinds]
        return sorted(found, key=lambda o: (o.version, o.key))

    @cached_property
    def versions(self) -> list[StoredObject]:
        """Commits and snapshots, oldest version first."""
        return self.of_kind("commit", "snapshot")

    @cached_property
    def first_version(self) -> int:
        """The lowest version number of a commit or snapshot; 0 without one."""
        return self.versions[0].version if self.versions else 0

    @property
    def commits_since_snapshot(self) -> int:
        """Number of commits since the newest snapshot, or of all commits without one: roughly those a restore reads."""
        snapshot_ms = self._snapshot_ms
        return sum(o.kind == "commit" and o.modified_ms > snapshot_ms for o in self.versions)

    @property
    def troubles(self) -> list[StoredObject]:
        """Failure reports, except those of failed snapshots that are older than the newest snapshot."""
        snapshot_ms = self._snapshot_ms
        reports = self.of_kind("trouble")
        return [o for o in reports if o.modified_ms > snapshot_ms or not o.key.startswith("troubles/snapshot-")]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects, including those that only older versions need."""
        return sum(o.size_bytes for o in self.objects.values())

    @cached_property
    def newest_snapshot(self) -> StoredObject | None:
        """The snapshot that was stored last; None if there is none."""
        return max(self.of_kind("snapshot"), key=lambda o: (o.modified_ms, o.version), default=None)

    @property
    def _snapshot_ms(self) -> int:
        return self.newest_snapshot.modified_ms if self.newest_snapshot else 0


@dataclass(frozen=True)
class OperatorListing:
    """The objects of an operator."""

    name: str
    shards: Mapping[str, ShardListing]  #: By prefix
    #: The operator record, probes, claims, schemas and unknown objects, by key below the operator
    others: tuple[ObjectInfo, ...]

    def probes(self) -> list[ObjectInfo]:
        """Return the objects that probes of the storage left outside the shards."""
        return [info for info in self.others if info.key.startswith("probes/")]

    def claim(self) -> ObjectInfo | None:
        """Return the newest claim, with its key in the folder of claims."""
        return newest_among(info for info, _ in self._claims())

    def besides(self) -> list[ObjectInfo]:
        """Return the objects of runs beside the holder, of any age."""
        return [stored for info, stored in self._claims() if Beside.of(info) is not None]

    def _claims(self) -> Iterator[tuple[ObjectInfo, ObjectInfo]]:
        """Yield each object in the folder of claims under two keys: below that folder, and below the operator."""
        folder = f"{CLAIMS}/"
        for info in self.others:
            if info.key.startswith(folder):
                yield replace(info, key=info.key.removeprefix(folder)), info


@dataclass(frozen=True)
class StateDirListing:
    """The objects of a state directory."""

    operators: Mapping[str, OperatorListing]  #: By name
    unknown: tuple[ObjectInfo, ...]  #: Objects that belong to no operator
    #: By folder, the savepoints of rescales that are in progress or were killed
    rescaling: Mapping[str, list[ObjectInfo]] = field(default_factory=dict)
    sinks: tuple[StoredSink, ...] = ()  #: The logs of sinks

    def without_record(self) -> list[str]:
        """Return the folders that hold commits or snapshots of shards, but no operator record."""
        return sorted({info.key.partition("/")[0] for info in self.unknown if _is_version(info)})


def parse_object(info: ObjectInfo) -> StoredObject:
    """Classify an object by its key below the shard."""
    key = info.key
    folder, _, name = key.partition("/")
    kind, pointer = "unknown", None
    if folder == "commits" and (found := _pointer(name)):
        kind, pointer = "commit", found
    elif folder == "snapshots" and (match := _SNAPSHOT.fullmatch(name)) and (found := _pointer(match[1])):
        kind, pointer = "snapshot", found
    elif PART_NAME.fullmatch(key):
        kind = "part"
    elif folder == "probes" and name and "/" not in name:
        kind = "probe"
    elif folder == "troubles" and TROUBLE_NAME.fullmatch(name):
        kind = "trouble"
    return StoredObject(key, kind, pointer, info.size_bytes, info.modified_ms)


def _pointer(name: str) -> Pointer | None:
    try:
        return Pointer.parse(name)
    except InvalidArgumentError:
        return None


def list_shard(shard: PrefixedStorage) -> ShardListing:
    """List one shard completely, or raise."""
    return _shard(shard.prefix, shard.list(""))


def _shard(prefix: str, infos: Iterable[ObjectInfo]) -> ShardListing:
    objects = [parse_object(info) for info in infos]
    return ShardListing(prefix, {o.key: o for o in objects})


def list_state_dir(storage: ObjectStorage, operator: str | None = None) -> StateDirListing:
    """List a state directory, or one of its operators. Raises `NotFoundError`."""
    infos = storage.list(f"{operator}/" if operator else "")
    found = _listing(infos)
    if not found.operators and not found.sinks:
        raise _nothing_found(storage, operator, infos)
    return found


def list_begun(storage: ObjectStorage) -> StateDirListing:
    """List a state directory that may have no record yet. Raises `NotFoundError` if all its objects are foreign."""
    infos = storage.list("")
    found = _listing(infos)
    is_inside = any(info.key == "operator" for info in found.unknown)  # one operator's directory was given
    unknown = tuple(info for info in found.unknown if not _BEGUN.fullmatch(info.key))
    is_begun = not is_inside and (len(unknown) < len(found.unknown) or any(map(_is_version, unknown)))
    if found.unknown and not (found.operators or found.sinks or is_begun):
        raise _nothing_found(storage, None, infos)
    return replace(found, unknown=unknown)


def _listing(infos: Collection[ObjectInfo]) -> StateDirListing:
    names = {info.key.removesuffix("/operator") for info in infos if info.key.count("/") == 1 and _is_record(info)}
    of_operator: dict[str, list[ObjectInfo]] = {name: [] for name in sorted(names)}
    unknown: list[ObjectInfo] = []
    rescaling: dict[str, list[ObjectInfo]] = {}
    for info in infos:
        folder, rescaled = info.key.partition("/")[0], _RESCALED.fullmatch(info.key)
        if rescaled:
            rescaling.setdefault(rescaled[1], []).append(replace(info, key=rescaled[2]))
        elif folder != QUERIES and parse_key(info.key) is None:
            of_operator.get(folder, unknown).append(info)
    found = {name: _operator(name, of_operator[name]) for name in of_operator}
    return StateDirListing(found, tuple(unknown), rescaling, stored_sinks(infos))


def _operator(name: str, infos: Iterable[ObjectInfo]) -> OperatorListing:
    shards: dict[str, list[ObjectInfo]] = {}
    others = []
    for info in infos:
        below = info.key.removeprefix(f"{name}/")
        folder, _, key = below.partition("/")
        if key and _SHARD.fullmatch(folder):
            shards.setdefault(f"{name}/{folder}", []).append(replace(info, key=key))
        else:
            others.append(replace(info, key=below))
    return OperatorListing(name, {p: _shard(p, shards[p]) for p in sorted(shards)}, tuple(others))


def _is_record(info: ObjectInfo) -> bool:
    return info.key.endswith("/operator")


def _is_version(info: ObjectInfo) -> bool:
    """Return whether an object is a commit or snapshot of any operator's shard."""
    _, _, below = info.key.partition("/")
    folder, _, key = below.partition("/")
    return bool(_SHARD.fullmatch(folder)) and parse_object(replace(info, key=key)).pointer is not None


def _nothing_found(storage: ObjectStorage, operator: str | None, infos: Collection[ObjectInfo]) -> NotFoundError:
    if operator:
        near = did_you_mean(operator, _listing(storage.list("")).operators)
        message = f"the state directory holds no operator of this name: check name and URL{near}"
        return NotFoundError(message, operator=operator, storage=storage.url)
    if not infos:
        message = (
            "the state directory is empty or does not exist: check that the URL is the value of "
            "spark.holdfast.state.dir, and that a query has committed to it"
        )
        return NotFoundError(message, storage=storage.url)
    if any(info.key == "operator" for info in infos):
        hint = "this is the directory of one operator: give the directory above it"
    elif below := next((info.key for info in infos if _is_record(info)), None):
        hint = f"one of its folders does: give {storage.url}/{below.rsplit('/', 2)[0]}"
    elif any(info.key == _MANIFEST for info in infos):
        hint = "this is a savepoint: `holdfast savepoint show` and `verify` take its directory and its name"
    elif any(info.key.partition("/")[2] == _MANIFEST for info in infos):
        hint = "this is a directory of savepoints: `holdfast savepoint list` shows them"
    else:
        hint = "check that the URL is the value of spark.holdfast.state.dir"
    return NotFoundError(f"the directory holds no holdfast state; {hint}", storage=storage.url, objects=len(infos))


class Headers:
    """A cache of the headers of a shard's commits and snapshots, which never change; for any thread.

    `known` holds headers that were read elsewhere, by key.
    """

    def __init__(self, shard: PrefixedStorage, known: Mapping[str, Commit | Manifest] = MappingProxyType({})) -> None:
        self.shard = shard
        self._known = dict(known)

    def commit(self, stored: StoredObject) -> Commit:
        """Return a commit, without its rows. Raises `NotFoundError`, `CorruptionError`, `UnavailableError`."""
        header = self._read(stored)
        assert isinstance(header, Commit)
        return header

    def manifest(self, stored: StoredObject) -> Manifest:
        """Return the manifest of a snapshot; raises the same errors as `commit`."""
        header = self._read(stored)
        assert isinstance(header, Manifest)
        return header

    def forget_all_but(self, keys: Collection[str]) -> None:
        """Drop all headers from the cache except those of `keys`."""
        for key in self._known.keys() - set(keys):
            del self._known[key]

    def _read(self, stored: StoredObject) -> Commit | Manifest:
        if stored.key not in self._known:
            self._known[stored.key], _ = read_header(self.shard, stored)
        return self._known[stored.key]


def read_header(
    shard: PrefixedStorage, stored: StoredObject
) -> tuple[Commit, ChainEntry] | tuple[Manifest, ChainEntry]:
    """Return a manifest, or a commit without its rows (of a large one, only the end is read), and its chain entry."""
    source = f"{shard.url}/{stored.key}"
    if stored.kind == "snapshot":
        return read_manifest(shard.get(stored.key), shard.prefix, source, stored.key)
    assert stored.pointer is not None
    if _is_large(stored):
        read = partial(shard.get_range, stored.key)
        commit = read_commit_end(read, stored.size_bytes, shard.prefix, stored.pointer, source)
    else:
        commit = read_commit(shard.get(stored.key), shard.prefix, stored.pointer, source).without_rows()
    return commit, commit.entry


def require_whole(shard: PrefixedStorage, stored: StoredObject, header: Commit | Manifest) -> None:
    """Read and verify the rest of an object after `read_header`. Raises `CorruptionError`."""
    if isinstance(header, Commit) and _is_large(stored):
        require_intact(partial(shard.get_range, stored.key), header)


def _is_large(stored: StoredObject) -> bool:
    return stored.size_bytes > NOTICE_BYTES_MAX


@dataclass(frozen=True)
class StateSize:
    """The stored size of an operator's state."""

    of_shards: Mapping[str, int]  #: Bytes by the shard's prefix
    estimated: int  #: Number of shards that are estimated from other shards

    @property
    def state_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(self.of_shards.values())


class StateSizes:
    """State sizes of a directory's operators; caches manifests' sizes. Not for threads of `executor`."""

    def __init__(self, storage: ObjectStorage, executor: Executor) -> None:
        self._storage, self._executor = storage, executor
        self._manifest_bytes = lru_cache(_KNOWN_MAX)(self._read_manifest_bytes)

    def of_operator(self, operator: OperatorListing) -> StateSize:
        """Return an operator's state size, from at most `SHARDS_READ_MAX` snapshots. Raises `UnavailableError`."""
        shards = list(operator.shards.values())
        with_snapshot = [shard for shard in shards if shard.newest_snapshot]
        step = max(len(with_snapshot) / SHARDS_READ_MAX, 1)
        chosen = [with_snapshot[int(place * step)] for place in range(min(len(with_snapshot), SHARDS_READ_MAX))]
        sizes = self._executor.map(self._state_bytes, chosen)
        read = {shard.prefix: size for shard, size in zip(chosen, sizes, strict=True) if size is not None}
        stored = sum(shard.stored_bytes for shard in chosen if shard.prefix in read)
        share = sum(read.values()) / stored if stored else 1.0
        found = {}
        for shard in shards:
            if shard.newest_snapshot is None:
                found[shard.prefix] = sum(o.size_bytes for o in shard.of_kind("commit"))
            else:
                found[shard.prefix] = read.get(shard.prefix, int(shard.stored_bytes * share))
        return StateSize(found, len(with_snapshot) - len(read))

    def snapshot_bytes(self, prefix: str, stored: StoredObject) -> int | None:
        """Return the size of the state in a shard's snapshot; None if that is damaged, deleted or unreadable."""
        try:
            return self._manifest_bytes(prefix, stored)
        except InvalidArgumentError:  # access denied, which may change
            return None

    def _read_manifest_bytes(self, prefix: str, stored: StoredObject) -> int | None:
        try:
            return Headers(PrefixedStorage(self._storage, prefix)).manifest(stored).stored_bytes
        except (CorruptionError, NotFoundError):  # damaged, or deleted since the listing
            return None

    def _state_bytes(self, shard: ShardListing) -> int | None:
        newest = shard.newest_snapshot
        assert newest is not None
        in_snapshot = self.snapshot_bytes(shard.prefix, newest)
        later = sum(o.size_bytes for o in shard.of_kind("commit") if o.modified_ms > newest.modified_ms)
        return None if in_snapshot is None else in_snapshot + later
