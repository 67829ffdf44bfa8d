"""Which of a shard's stored objects may be deleted: one set of rules for background clean-ups and ``holdfast gc``.

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
* **needed**: what a version at or above the anchor may need stays, with or without its snapshot.
* **grace**: nothing younger than the grace period is deleted; ages are by the store's clock.
* **knowing**: a failed listing, a damaged header or a missing object never counts as "needs nothing": then nothing of
  the shard is deleted. A damaged link names an object that is not there: so this holds as well of a large commit, of
  which only the end is read, without a checksum.
* **order**: objects that name others are deleted before those they name; so a crash leaves garbage, not damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.snapshotter.upkeep.headers import Headers
from holdfast.snapshotter.upkeep.history import History, links, needed_from

RETAINED_VERSIONS = 100
"""The default of ``spark.sql.streaming.minBatchesToRetain``."""
GRACE_MS = 60 * 60_000
_OF_CLEAN_UP = "troubles/clean-up-"


@dataclass(frozen=True)
class Plan:
    """What stays and what goes, each with its reason."""

    shard: str
    needed_from: int  #: The lowest version number whose objects may be needed
    #: Reason by key below the shard. `delete` is in the order in which to delete.
    keep: Mapping[str, str] = field(default_factory=dict)
    delete: Mapping[str, str] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()  #: Those keys of `delete` that go last, because others of it name them
    delete_bytes: int = 0


def plan(history: History, needed: int, now_ms: int, grace_ms: int) -> Plan:
    """Decide about each object of a shard.

    Raises `CorruptionError`, `NotFoundError` or `UnavailableError` if the manifest of a remaining snapshot cannot be
    read, so the parts it needs are unknown.

    `needed`: see `holdfast.snapshotter.upkeep.history.needed_from`; `now_ms`: the time by the store's clock;
    `grace_ms`: what is younger than this stays.
    """
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
    "trouble": "reported a failure",
    "unknown": "not written by holdfast",
}


def carry_out(shard: ObjectStorage, planned: Plan) -> None:
    """Delete the objects of a plan.

    Raises `InvalidArgumentError` or `UnavailableError` if some objects could not be deleted; the error names them.
    Parts are then left alone, since one of those objects may name them. Run it again to delete the rest.

    `shard`: holds the planned keys.
    """
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
) -> Plan:
    """Delete objects that no retained version needs, and return what was done.

    Raises `CorruptionError` or `NotFoundError`, before anything is deleted, if an object that is needed to decide is
    damaged or missing, or has vanished meanwhile: another clean-up is running. Raises `InvalidArgumentError` or
    `UnavailableError` if the storage refused, or did not answer; some objects may have been deleted.

    `pointer`: the version that the query has accepted; `chain`: all stored objects that this version is made of, oldest
    first; `retained`: how many versions before it the query may return to; `grace_ms`: see `plan`; `headers`: of this
    shard; reused, it saves reading most headers again.

    Cost: one small put, one listing, one or two deletes; a get for each snapshot since the horizon and for one commit,
    less what `headers` knows.
    """
    probe = _put_probe(shard, new_id)
    listing = list_shard(shard)
    history = History(listing, headers or Headers(shard))
    history.headers.forget_all_but(listing.objects.keys())
    try:
        now_ms = _stored_ms(shard.url, probe, {o.key: o.modified_ms for o in listing.of_kind("probe")})
        needed = needed_from(links(chain), pointer.version - retained, history)
        planned = plan(history, needed, now_ms, grace_ms)
    except (CorruptionError, NotFoundError):
        shard.delete([probe])
        raise
    own = {probe: "read the store's clock"}
    own |= {
        o.key: "reported a clean-up failure that is over" for o in listing.of_kind("trouble") if _OF_CLEAN_UP in o.key
    }
    carry_out(shard, replace(planned, delete=own | dict(planned.delete)))
    return planned


def store_time_ms(folder: ObjectStorage, new_id: Callable[[], str] = clock.new_id) -> int:
    """Return the time by the store's clock: stores a small object, reads its time and deletes it.

    Raises `InvalidArgumentError` or `UnavailableError` if the storage refused, or did not answer.
    """
    probe = _put_probe(folder, new_id)
    listed = {info.key: info.modified_ms for info in folder.list("probes/")}
    folder.delete([probe])
    return _stored_ms(folder.url, probe, listed)


def _put_probe(folder: ObjectStorage, new_id: Callable[[], str]) -> str:
    probe = f"probes/clock-{new_id()}"
    folder.put(probe, probe.encode())
    return probe


def _stored_ms(url: str, probe: str, listed: Mapping[str, int]) -> int:
    if probe not in listed:
        raise UnavailableError(
            "the storage does not list what was just stored: nothing is deleted", key=probe, storage=url
        )
    return listed[probe]
