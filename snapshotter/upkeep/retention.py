"""What of a shard's stored objects may go: one set of rules for the background and for ``holdfast gc``.

::

                      horizon = newest version - retained
                         │
    S20 c21 … c40  S40 c41 │ c42 …  c60  S60 c61 …          c120     version the query is at
     ▲              ▲    ▲ │
     │              │    └─┼─ anchor: the newest commit of the lineage at or below the horizon;
     │              │      │  Spark may still ask for it and for all after it
     │              └──────┼─ the snapshot at which the anchor's chain begins
     └─────────────────────┴─ the one before: with it and the commits since, a damaged S40 can be done without

    below S20: goes               S20 and everything after it, of whatever lineage: stays

A chain changes only by a newer snapshot taking the place of its beginning: one of a commit object in it, or of a
version that was carried since the newest of them. So what descends from a commit object never has a chain that begins
before that object's own. The anchor's chain therefore tells, for all that come after it, from which version number on
objects may be needed. That one number decides about commits and snapshots; parts of files stay as long as a remaining
manifest names them. docs/decisions/0014-retention.md has the reasoning, also for what is rolled back, dropped or
carried in Spark's own state.

Invariants
----------
* **needed**: what a version at or above the anchor may need stays, and what is needed to do without its snapshot.
* **grace**: nothing younger than the grace period goes, whatever it is; young means by the store's clock.
* **knowing**: a listing that fails, a header that is damaged or an object that is missing never counts as "needs
  nothing": then nothing of the shard goes.
* **order**: what names objects goes before the objects it names; so what is left after a crash is garbage, not damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.catalogue import (
    Headers,
    Link,
    ShardListing,
    StoredObject,
    links,
    list_shard,
    replaced_by,
)

RETAINED_VERSIONS = 100
"""The default of ``spark.sql.streaming.minBatchesToRetain``."""
GRACE_MS = 60 * 60_000
_OF_CLEAN_UP = "troubles/clean-up-"


@dataclass(frozen=True)
class Plan:
    """What stays and what goes, each with its reason.

    Attributes
    ----------
    shard : str
    needed_from : int
        The lowest version number whose objects may be needed.
    keep, delete : mapping of str to str
        Reason by key below the shard. `delete` is in the order in which to delete.
    parts : frozenset of str
        Those keys of `delete` that go last, because others of it name them.
    delete_bytes : int
    """

    shard: str
    needed_from: int
    keep: Mapping[str, str] = field(default_factory=dict)
    delete: Mapping[str, str] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()
    delete_bytes: int = 0


class History:
    """What each object of a shard builds on, as its header says.

    Parameters
    ----------
    listing : ShardListing
    headers : Headers
    """

    def __init__(self, listing: ShardListing, headers: Headers) -> None:
        self.listing = listing
        self.headers = headers

    def before(self, link: Link) -> tuple[Link, ...]:
        """Return what a commit builds on, or the chain that a snapshot stands for; empty where history begins.

        Raises
        ------
        CorruptionError
            The object is damaged, or it is missing although older ones are there.
        NotFoundError, UnavailableError
            It has gone since the listing, or cannot be read now.
        """
        if not self._is_there(link):
            return ()
        if link.kind == "snapshot":
            older = links(replaced_by(self.headers.manifest(link.key)))
        else:
            older = links(self.headers.commit(link.key).chain)
        if older and older[0].version > link.version:
            raise CorruptionError("an object builds on a later version", key=self._place(link))
        return older

    def commit_before(self, link: Link) -> Link | None:
        """Return the commit object that a commit follows, as far as history goes; raises as `before`."""
        last = self.headers.commit(link.key).last if self._is_there(link) else None
        return links([last])[0] if last else None

    def require(self, needed: Iterable[Link]) -> None:
        """Raise `CorruptionError` where an object is missing: what is listed then is not what there should be."""
        for link in needed:
            self._is_there(link)

    @cached_property
    def cleaned_below(self) -> int:
        """The version number below which a clean-up has deleted everything, as far as stored snapshots know."""
        manifests = (self.headers.manifest(stored.key) for stored in self.listing.of_kind("snapshot"))
        return max((manifest.cleaned.below for manifest in manifests), default=0)

    def _is_there(self, link: Link) -> bool:
        """Tell whether an object is there; where history ends, it was cleaned up with all before it.

        History ends below all that is there, or where a snapshot says so: below may lie what a late attempt has
        stored since, or a clean-up could not delete.
        """
        if link.key in self.listing.objects:
            return True
        if link.version < self.listing.first_version or link.version < self.cleaned_below:
            return False
        raise CorruptionError("an object that others build on is missing", key=self._place(link))

    def _place(self, link: Link) -> str:
        return f"{self.listing.prefix}/{link.key}"

    def chains(self, chain: tuple[Link, ...], horizon: int) -> list[tuple[Link, ...]]:
        """Return the chain of a version, the one that its snapshot stands for, and so on back to the horizon."""
        found = []
        seen: set[str] = set()
        while chain:
            found.append(chain)
            first = chain[0]
            if first.kind != "snapshot" or _newest_commit(chain, horizon):
                break
            if first.key in seen:
                raise CorruptionError("a snapshot stands for itself", key=self._place(first))
            seen.add(first.key)
            chain = self.before(first)
        return found

    def chain_of(self, stored: StoredObject) -> tuple[Link, ...]:
        """Return all that a stored commit or snapshot is made of, itself too; raises as `before`."""
        own = Link(stored.key, stored.kind, stored.version)
        return (*self.before(own), own) if own.kind == "commit" else (own,)


def _newest_commit(chain: tuple[Link, ...], horizon: int) -> Link | None:
    return next((e for e in reversed(chain) if e.kind == "commit" and e.version <= horizon), None)


def needed_from(chain: tuple[Link, ...], horizon: int, history: History) -> int:
    """Return the lowest version number of which objects may be needed while the query may return to the horizon.

    Parameters
    ----------
    chain : tuple of Link
        All stored objects that the version is made of at which the query is, oldest first.
    horizon : int
        The lowest version number that the query may return to.
    history : History

    Returns
    -------
    int
        0 where the lineage has no commit object that is old enough to tell.

    Raises
    ------
    CorruptionError, NotFoundError, UnavailableError
        A header on the way cannot be had.

    Notes
    -----
    Cost: one read of each snapshot's manifest back to the horizon, and of three commits.
    """
    chains = history.chains(chain, horizon)
    anchor = _newest_commit(chains[-1], horizon) if chains else None
    if anchor is None:
        # So far all may be needed: while commits are carried, any snapshot since the newest commit object may be.
        return 0
    own = (*history.before(anchor), anchor)
    # Where the snapshot is damaged, a restore goes on at the commit before the first one on it.
    around = history.commit_before(next(link for link in own if link.kind == "commit"))
    oldest = (*history.before(around), around)[0] if around else own[0]
    history.require(link for part in (*chains, own) for link in part)
    return oldest.version


def needed_in_storage(retained: int, history: History) -> int:
    """Return the lowest version number of which objects may be needed, where only the storage is known.

    Parameters
    ----------
    retained : int
        How many versions before the newest one the query may return to.

    Raises
    ------
    CorruptionError, NotFoundError, UnavailableError
        As `needed_from`.

    Notes
    -----
    What the query is at cannot be seen: it may have dropped the newest commits, or have gone back. So each commit and
    snapshot above the horizon counts as a version that it may be at, unless another one builds on it.
    """
    versions = history.listing.versions
    if not versions:
        return 0
    newest_ms = max(o.modified_ms for o in versions)
    # By time, not by number: a query that went back some versions is at the one it wrote last.
    horizon = min(o.version for o in versions if o.modified_ms == newest_ms) - max(1, retained)
    needed = versions[-1].version
    built_on: set[str] = set()
    for stored in reversed(versions):
        if stored.version > horizon and stored.key not in built_on:
            chain = history.chain_of(stored)
            built_on.update(link.key for older in history.chains(chain, horizon) for link in older)
            needed = min(needed, needed_from(chain, horizon, history))
    return needed


def plan(history: History, needed: int, now_ms: int, grace_ms: int) -> Plan:
    """Decide about each object of a shard.

    Parameters
    ----------
    history : History
    needed : int
        See `needed_from`.
    now_ms : int
        The time by the store's clock.
    grace_ms : int
        What is younger than this stays.

    Raises
    ------
    CorruptionError, NotFoundError, UnavailableError
        The manifest of a snapshot that stays cannot be had, so nobody knows which parts it needs.
    """
    shard = history.listing
    keep: dict[str, str] = {}
    delete: dict[str, str] = {}
    for stored in shard.versions:
        if stored.version >= needed:
            keep[stored.key] = f"may be needed: what is retained builds on version {needed} and later ones"
        else:
            delete[stored.key] = f"no retained version builds on what is older than version {needed}"
    young = {key for key in delete if shard.objects[key].modified_ms > now_ms - grace_ms}
    remaining = [o for o in shard.of_kind("snapshot") if o.key in keep or o.key in young]
    named = {part.key for o in remaining for file in history.headers.manifest(o.key).files for part in file.parts}
    for stored in shard.of_kind("part", "probe", "trouble", "unknown"):
        if stored.key in named:
            keep[stored.key] = "a snapshot that stays names it"
        else:
            delete[stored.key] = _LEFT[stored.kind]
    for key in [key for key in delete if shard.objects[key].modified_ms > now_ms - grace_ms]:
        keep[key] = f"younger than the grace period; later: {delete.pop(key)}"
    return Plan(
        shard.prefix,
        needed,
        keep,
        delete,
        frozenset(key for key in delete if shard.objects[key].kind == "part"),
        sum(shard.objects[key].size_bytes for key in delete),
    )


_LEFT = {
    "part": "no snapshot that stays names it",
    "probe": "left by a test of the storage",
    "trouble": "told of a failure",
    "unknown": "nothing that holdfast has put into a shard's folder",
}


def carry_out(storage: ObjectStorage, planned: Plan) -> None:
    """Delete what a plan says.

    Raises
    ------
    InvalidArgumentError, UnavailableError
        Some objects could not be deleted; the error names them. The parts of files are then left alone, since one
        of those objects may name them. Doing it again does the rest.
    """
    for last in (False, True):
        keys = [f"{planned.shard}/{key}" for key in planned.delete if (key in planned.parts) == last]
        if keys:
            storage.delete(keys)


def run_retention(
    storage: ObjectStorage,
    prefix: str,
    pointer: Pointer,
    chain: Iterable[ChainEntry],
    *,
    retained: int = RETAINED_VERSIONS,
    grace_ms: int = GRACE_MS,
    headers: Headers | None = None,
    new_id: Callable[[], str] = clock.new_id,
) -> Plan:
    """Delete what no version that the query may return to can need.

    Parameters
    ----------
    storage : ObjectStorage
    prefix : str
        Of the shard.
    pointer : Pointer
        The version that the query has accepted.
    chain : iterable of ChainEntry
        All stored objects that this version is made of, oldest first.
    retained : int
        How many versions before it the query may return to.
    grace_ms : int
        See `plan`.
    headers : Headers, optional
        Of this shard; handed in again the next time, it saves reading most headers twice.

    Returns
    -------
    Plan
        What was done.

    Raises
    ------
    CorruptionError
        A stored object that is needed to decide is damaged or missing. Nothing was deleted.
    NotFoundError
        One vanished meanwhile: somebody else cleans up. Nothing was deleted.
    InvalidArgumentError, UnavailableError
        The storage refused, or did not answer; some objects may have been deleted.

    Notes
    -----
    Cost: one small put, one listing, one or two deletes; a get for each snapshot since the horizon and for one commit,
    less what `headers` knows.
    """
    probe = _put_probe(storage, prefix, new_id)
    listing = list_shard(storage, prefix)
    history = History(listing, headers or Headers(storage, prefix))
    history.headers.forget_all_but(listing.objects.keys())
    try:
        now_ms = _stored_ms(storage.url, probe, {f"{prefix}/{o.key}": o.modified_ms for o in listing.of_kind("probe")})
        needed = needed_from(links(chain), pointer.version - retained, history)
        planned = plan(history, needed, now_ms, grace_ms)
    except (CorruptionError, NotFoundError):
        storage.delete([probe])
        raise
    own = {probe.removeprefix(f"{prefix}/"): "told the time"}
    own |= {o.key: "the clean-up that had failed succeeds" for o in listing.of_kind("trouble") if _OF_CLEAN_UP in o.key}
    carry_out(storage, replace(planned, delete=own | dict(planned.delete)))
    return planned


def store_time_ms(storage: ObjectStorage, folder: str, new_id: Callable[[], str] = clock.new_id) -> int:
    """Return the time by the store's clock: when a small object was stored that is deleted again.

    Raises
    ------
    InvalidArgumentError, UnavailableError
        The storage refused, or did not answer.
    """
    probe = _put_probe(storage, folder, new_id)
    listed = {info.key: info.modified_ms for info in storage.list(f"{folder}/probes/")}
    storage.delete([probe])
    return _stored_ms(storage.url, probe, listed)


def _put_probe(storage: ObjectStorage, folder: str, new_id: Callable[[], str]) -> str:
    probe = f"{folder}/probes/clock-{new_id()}"
    storage.put(probe, probe.encode())
    return probe


def _stored_ms(url: str, probe: str, listed: Mapping[str, int]) -> int:
    if probe not in listed:
        raise UnavailableError(
            "the storage does not list what was just stored: nothing is deleted", key=probe, storage=url
        )
    return listed[probe]
