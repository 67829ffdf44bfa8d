"""What a shard's stored objects build on, and the lowest version number that may be needed.

The picture and the rules are those of `holdfast.snapshotter.upkeep.retention`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from holdfast.errors import CorruptionError
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.upkeep.catalogue import ShardListing, StoredObject
from holdfast.snapshotter.upkeep.headers import Headers


class Link(NamedTuple):
    """An object of a chain, as its key describes it."""

    key: str  #: Below the shard
    kind: str
    version: int  #: The number of its version


def links(chain: Iterable[ChainEntry]) -> tuple[Link, ...]:
    """Return the links of a chain."""
    return tuple(Link(e.key, e.kind, e.version) for e in chain)


class History:
    """What each object of a shard builds on, as its header says."""

    def __init__(self, listing: ShardListing, headers: Headers) -> None:
        self.listing = listing
        self.headers = headers

    def before(self, link: Link) -> tuple[Link, ...]:
        """Return what a commit builds on, or the chain that a snapshot replaces; empty where history begins.

        Raises `CorruptionError` if the object is damaged, or it is missing although older ones are there;
        `NotFoundError` or `UnavailableError` if it has gone since the listing, or cannot be read now.
        """
        if not self._is_there(link):
            return ()
        if link.kind == "snapshot":
            return links(self.headers.manifest(self.listing.objects[link.key]).replaced)
        return links(self.headers.commit(self.listing.objects[link.key]).lineage.chain)

    def commit_before(self, link: Link) -> Link | None:
        """Return the commit object that a commit follows, as far as history goes; raises as `before`."""
        if not self._is_there(link):
            return None
        last = self.headers.commit(self.listing.objects[link.key]).lineage.last
        return links([last])[0] if last else None

    def require_listed(self, needed: Iterable[Link]) -> None:
        """Raise `CorruptionError` if an object is missing that no clean-up deleted."""
        for link in needed:
            self._is_there(link)

    def require(self, needed: Iterable[Link]) -> None:
        """Raise `CorruptionError` if an object is missing: the listing is then incomplete.

        A snapshot's parts too: later snapshots name them again, so what could stand in for it must stay until they are
        stored anew.
        """
        for link in needed:
            if self._is_there(link) and link.kind == "snapshot":
                self._require_parts(link)

    def _require_parts(self, link: Link) -> None:
        objects = self.listing.objects
        for file in self.headers.manifest(objects[link.key]).files:
            for part in file.missing(lambda key: objects[key].size_bytes if key in objects else None):
                raise CorruptionError(
                    "a part that a snapshot names is missing, or has another size",
                    key=f"{self.listing.prefix}/{part.key}",
                    snapshot=self._place(link),
                )

    @cached_property
    def cleaned_below(self) -> int:
        """The version number below which a clean-up has deleted everything, as far as stored snapshots know."""
        manifests = (self.headers.manifest(stored) for stored in self.listing.of_kind("snapshot"))
        return max((manifest.cleaned.below for manifest in manifests), default=0)

    def _is_there(self, link: Link) -> bool:
        """Tell whether an object exists; beyond the end of history, clean-ups deleted all.

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
                raise CorruptionError("a snapshot replaces itself", key=self._place(first))
            seen.add(first.key)
            chain = self.before(first)
        return found

    def chain_of(self, stored: StoredObject) -> tuple[Link, ...]:
        """Return the chain of a stored commit or snapshot, itself included; raises as `before`."""
        own = Link(stored.key, stored.kind, stored.version)
        return (*self.before(own), own) if own.kind == "commit" else (own,)


def _newest_commit(chain: tuple[Link, ...], horizon: int) -> Link | None:
    return next((e for e in reversed(chain) if e.kind == "commit" and e.version <= horizon), None)


def needed_from(chain: tuple[Link, ...], horizon: int, history: History) -> int:
    """Return the lowest version number whose objects the query may need to return to the horizon.

    Raises `CorruptionError`, `NotFoundError` or `UnavailableError` if a header on the way cannot be had.

    `chain`: all stored objects that the version is made of at which the query is, oldest first; `horizon`: the lowest
    version number that the query may return to.

    Returns 0 where the lineage has no commit object that is old enough to tell.

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
    without_it = (*history.before(around), around) if around else own
    history.require(link for part in (*chains, own) for link in part)
    history.require_listed(without_it)
    return without_it[0].version


def needed_in_storage(retained: int, history: History) -> int:
    """Return the lowest version number whose objects may be needed, knowing the storage only.

    Raises `CorruptionError`, `NotFoundError` or `UnavailableError`: as `needed_from`.

    `retained`: how many versions before the newest one the query may return to.

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
