"""Decides which stored objects of a shard may be deleted, for background clean-ups and ``holdfast gc``.

::

                      horizon = newest version - retained
                         │
    S20 c21 … c40  S40 c41 │ c42 …  c60  S60 c61 …          c120     version the query is at
     ▲              ▲    ▲ │
     │              │    └─┼─ anchor: the newest commit of the lineage at or below the horizon;
     │              │      │  Spark may still return to it or to any later version
     │              └──────┼─ the snapshot at which the anchor's chain begins
     └─────────────────────┴─ the previous snapshot: with the commits since, it can replace a damaged S40

    below S20: deleted            S20 and everything after it, of any lineage: kept

A chain changes only when a newer snapshot replaces its beginning: a snapshot of a commit object in it, or of a version
carried since the newest commit object. So no descendant of a commit object has a chain that begins before the object's
own chain. The anchor's chain therefore gives the lowest version number that any later version needs. This number
decides about commits and snapshots; parts of files stay as long as a remaining manifest names them.
docs/decisions/0014-retention.md has the reasoning, also for versions rolled back, dropped or carried in Spark's state.

Invariants
----------
* **needed**: objects that a version at or above the anchor may need are kept, whether its snapshot is intact or not.
* **grace**: nothing younger than the grace period is deleted; ages are by the store's clock.
* **no guessing**: after a failed listing, a damaged header or a missing object, nothing of the shard is deleted. A
  large commit's header is read without its checksum, but a damaged header would name an object that does not exist.
* **order**: an object is deleted before the objects that it names, so a crash leaves garbage, not damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, ShardListing, StoredObject, list_shard

RETAINED_VERSIONS = 100
"""The default of ``spark.sql.streaming.minBatchesToRetain``."""
GRACE_MS = 60 * 60_000
_OF_CLEAN_UP = "troubles/clean-up-"
_LEFT = {
    "part": "no remaining snapshot names it",
    "probe": "left by a storage probe",
    "trouble": "reported a failure",
    "unknown": "not written by holdfast",
}


#: A commit or snapshot, as a chain names it or as it was listed.
Link: TypeAlias = ChainEntry | StoredObject


class History:
    """The objects that each object builds on, according to its header."""

    def __init__(self, listing: ShardListing, headers: Headers) -> None:
        self.listing = listing
        self.headers = headers
        self._cleaned_below: int | None = None

    def before(self, link: Link) -> tuple[Link, ...]:
        """Return a commit's chain, or the chain that a snapshot replaces; empty where stored history begins."""
        if not self.is_stored(link):
            return ()
        if link.kind == "snapshot":
            return self.headers.manifest(self.listing.objects[link.key]).replaced
        return self.headers.commit(self.listing.objects[link.key]).lineage.chain

    def commit_before(self, link: Link) -> Link | None:
        """Return the previous commit object, if it is still stored; raises the same errors as `before`."""
        if not self.is_stored(link):
            return None
        return self.headers.commit(self.listing.objects[link.key]).lineage.last

    def require(self, needed: Iterable[Link]) -> None:
        """Raise `CorruptionError` if an object, or a snapshot's part that later snapshots may reuse, is not listed."""
        objects = self.listing.objects
        for link in [link for link in needed if self.is_stored(link) and link.kind == "snapshot"]:
            for file in self.headers.manifest(objects[link.key]).files:
                for part in file.missing(lambda key: objects[key].size_bytes if key in objects else None):
                    raise CorruptionError(
                        "a part that a snapshot names is missing or has a different size",
                        key=f"{self.listing.prefix}/{part.key}",
                        snapshot=self._place(link),
                    )

    @property
    def cleaned_below(self) -> int:
        """The version number below which clean-ups have deleted everything, according to the stored snapshots."""
        if self._cleaned_below is None:  # no `cached_property`: in Python 3.11 shards would wait for each other's reads
            manifests = (self.headers.manifest(stored) for stored in self.listing.of_kind("snapshot"))
            self._cleaned_below = max((manifest.cleaned.below for manifest in manifests), default=0)
        return self._cleaned_below

    def is_stored(self, link: Link) -> bool:
        """Return whether an object exists; False if a clean-up may have deleted it. Raises `CorruptionError`."""
        if link.key in self.listing.objects:
            return True
        if link.version < self.listing.first_version or link.version < self.cleaned_below:
            return False
        raise CorruptionError("an object that others build on is missing", key=self._place(link))

    def _place(self, link: Link) -> str:
        return f"{self.listing.prefix}/{link.key}"

    def chains(self, chain: tuple[Link, ...], horizon: int) -> list[tuple[Link, ...]]:
        """Return a version's chain, the chain that its snapshot replaced, and so on down to the horizon."""
        found = []
        seen: set[str] = set()
        while chain:
            found.append(chain)
            first = chain[0]
            if first.kind != "snapshot" or _newest_commit(chain, horizon):
                break
            if first.key in seen:
                raise CorruptionError("a snapshot replaces itself", key=self._place(first))
            seen.add(first.key)
            chain = self.before(first)
        return found


def _newest_commit(chain: tuple[Link, ...], horizon: int) -> Link | None:
    return next((e for e in reversed(chain) if e.kind == "commit" and e.version <= horizon), None)


def needed_from(chain: tuple[Link, ...], horizon: int, history: History) -> int:
    """Return the lowest version number that the query needs to go back to `horizon`; 0 if no commit determines it."""
    chains = history.chains(chain, horizon)
    anchor = _newest_commit(chains[-1], horizon) if chains else None
    if anchor is None:
        # Everything may be needed: while commits are carried, so may any snapshot since the newest commit object.
        return 0
    own = (*history.before(anchor), anchor)
    # If the snapshot is damaged, a restore needs the commit before the first commit on it, and that commit's chain.
    around = history.commit_before(next(link for link in own if link.kind == "commit"))
    without_it = (*history.before(around), around) if around else own
    history.require(link for part in (*chains, own) for link in part)
    for link in without_it:
        history.is_stored(link)
    return without_it[0].version


def needed_in_storage(retained: int, history: History) -> int:
    """Return the lowest version number that may be needed, judging by the storage alone.

    The query may have dropped the newest commits, or gone back. So each commit or snapshot above the horizon may be the
    query's version, unless another object builds on it.
    """
    versions = history.listing.versions
    if not versions:
        return 0
    newest_ms = max(o.modified_ms for o in versions)
    # By time, not by number: a query that went back is at the version it wrote last.
    horizon = min(o.version for o in versions if o.modified_ms == newest_ms) - max(1, retained)
    needed = versions[-1].version
    built_on: set[str] = set()
    for stored in reversed(versions):
        if stored.version > horizon and stored.key not in built_on:
            chain: tuple[Link, ...] = (*history.before(stored), stored) if stored.kind == "commit" else (stored,)
            built_on.update(link.key for older in history.chains(chain, horizon) for link in older)
            needed = min(needed, needed_from(chain, horizon, history))
    return needed


@dataclass(frozen=True)
class CleanUpPlan:
    """The objects to keep and to delete, each with a reason."""

    shard: str
    needed_from: int  #: The lowest version number whose objects may be needed
    #: Reasons by key below the shard; `delete` is in order of deletion
    keep: Mapping[str, str] = field(default_factory=dict)
    delete: Mapping[str, str] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()  #: Keys of `delete` to delete last, because other objects in it name them
    delete_bytes: int = 0


def plan(history: History, needed: int, now_ms: int, grace_ms: int) -> CleanUpPlan:
    """Decide which objects of a shard to delete. Raises `CorruptionError`, `NotFoundError`, `UnavailableError`."""
    shard = history.listing
    keep: dict[str, str] = {}
    delete: dict[str, str] = {}
    for stored in shard.versions:
        if stored.version >= needed:
            keep[stored.key] = f"may be needed: retained versions build on version {needed} or later"
        else:
            delete[stored.key] = f"no retained version builds on anything older than version {needed}"
    young = {key for key in delete if shard.objects[key].modified_ms > now_ms - grace_ms}
    remaining = [o for o in shard.of_kind("snapshot") if o.key in keep or o.key in young]
    named = {part.key for o in remaining for file in history.headers.manifest(o).files for part in file.parts}
    for stored in shard.of_kind("part", "probe", "trouble", "unknown"):
        if stored.key in named:
            keep[stored.key] = "a remaining snapshot names it"
        else:
            delete[stored.key] = _LEFT[stored.kind]
    for key in [key for key in delete if shard.objects[key].modified_ms > now_ms - grace_ms]:
        keep[key] = f"younger than the grace period; later: {delete.pop(key)}"
    return CleanUpPlan(
        shard.prefix,
        needed,
        keep,
        delete,
        frozenset(key for key in delete if shard.objects[key].kind == "part"),
        sum(shard.objects[key].size_bytes for key in delete),
    )


def carry_out(shard: ObjectStorage, planned: CleanUpPlan) -> None:
    """Delete the objects of a plan; if a manifest cannot be deleted, keep all parts, which it may name."""
    for last in (False, True):
        keys = [key for key in planned.delete if (key in planned.parts) == last]
        if keys:
            shard.delete(keys)


def run_retention(
    shard: PrefixedStorage,
    pointer: Pointer,
    chain: Iterable[ChainEntry],
    *,
    retained: int = RETAINED_VERSIONS,
    grace_ms: int = GRACE_MS,
    headers: Headers | None = None,
    new_id: Callable[[], str] = clock.new_id,
) -> CleanUpPlan:
    """Delete objects that no retained version needs; if a needed object is damaged or missing, only raise."""
    probe = _put_probe(shard, new_id)
    listing = list_shard(shard)
    history = History(listing, headers or Headers(shard))
    history.headers.forget_all_but(listing.objects.keys())
    try:
        now_ms = _stored_ms(shard.url, probe, {o.key: o.modified_ms for o in listing.of_kind("probe")})
        needed = needed_from(tuple(chain), pointer.version - retained, history)
        planned = plan(history, needed, now_ms, grace_ms)
    except (CorruptionError, NotFoundError):
        shard.delete([probe])
        raise
    own = {probe: "used to read the store's clock"}
    own |= {
        o.key: "reported a failure of earlier clean-ups" for o in listing.of_kind("trouble") if _OF_CLEAN_UP in o.key
    }
    carry_out(shard, replace(planned, delete=own | dict(planned.delete)))
    return planned


def store_time_ms(folder: ObjectStorage) -> int:
    """Return the store's time, by putting and deleting an empty object."""
    probe = _put_probe(folder, clock.new_id)
    listed = {info.key: info.modified_ms for info in folder.list("probes/")}
    folder.delete([probe])
    return _stored_ms(folder.url, probe, listed)


def _put_probe(folder: ObjectStorage, new_id: Callable[[], str]) -> str:
    probe = f"probes/clock-{new_id()}"
    folder.put(probe, b"")  # empty: even a full disk may accept it
    return probe


def _stored_ms(url: str, probe: str, listed: Mapping[str, int]) -> int:
    if probe not in listed:
        raise UnavailableError(
            "the storage does not list an object just stored: nothing is deleted", key=probe, storage=url
        )
    return listed[probe]
