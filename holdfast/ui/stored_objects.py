"""The objects of an operator as columns: 29 bytes an object, so that a million of them fit, and are summed at once.

A shard's `number` is the one in its folder's name. Each measure has one value for each of `StoredObjects.shards`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from holdfast.snapshotter.upkeep.catalogue import ShardListing

Column = NDArray[np.int64]
KINDS = ("commit", "snapshot", "part", "trouble", "probe", "unknown")
COMMIT, SNAPSHOT, PART, TROUBLE = range(4)
HOUR_MS = 60 * 60_000


@dataclass(frozen=True)
class StoredObjects:
    """An operator's objects, as listed: one row an object."""

    kind: NDArray[np.int8]  #: Place in `KINDS`
    #: The version of a commit or snapshot, 0 of others; the time by the store's clock
    shard: Column
    version: Column
    size_bytes: Column
    modified_ms: Column
    shards: Column  #: The numbers of the shards that hold anything, ascending

    @classmethod
    def of(cls, listings: Iterable[ShardListing]) -> StoredObjects:
        """Return the objects of some shards as columns."""
        numbers = {kind: number for number, kind in enumerate(KINDS)}
        rows = (
            (numbers[o.kind], number, o.version, o.size_bytes, o.modified_ms)
            for listing in listings
            for number in [number_of(listing.prefix)]
            for o in listing.objects.values()
        )
        # Through a flat stream: a list of a million tuples would take more than all columns.
        flat = np.fromiter((_bounded(value) for row in rows for value in row), np.int64).reshape(-1, 5)
        kind, shard, version, size_bytes, modified_ms = flat.T
        return cls(kind.astype(np.int8), shard, version, size_bytes, modified_ms, np.unique(shard))

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self.kind)

    def of_kind(self, *kinds: int) -> NDArray[np.bool_]:
        """Return a mask of the rows of these kinds."""
        return np.isin(self.kind, kinds)

    @cached_property
    def place(self) -> Column:
        """Each object's shard, as an index into `shards`."""
        return np.searchsorted(self.shards, self.shard)

    @cached_property
    def stored_bytes(self) -> Column:
        """Bytes of each shard's objects."""
        return self._sum(np.ones(len(self), bool))

    @cached_property
    def newest_ms(self) -> int:
        """When the newest commit or snapshot was stored; 0 without one."""
        return int(self.modified_ms[self.of_kind(COMMIT, SNAPSHOT)].max(initial=0))

    @cached_property
    def newest_version(self) -> Column:
        """The highest version of each shard's commits and snapshots; 0 without any."""
        return self._greatest(self.version, self.of_kind(COMMIT, SNAPSHOT))

    @cached_property
    def stored_ms(self) -> Column:
        """When each shard's newest commit or snapshot was stored; 0 without any."""
        return self._greatest(self.modified_ms, self.of_kind(COMMIT, SNAPSHOT))

    @cached_property
    def snapshot_ms(self) -> Column:
        """When each shard's newest snapshot was stored; 0 without one."""
        return self._greatest(self.modified_ms, self.kind == SNAPSHOT)

    @cached_property
    def lag(self) -> Column:
        """Each shard's commits since its newest snapshot, which a restore reads on top of it."""
        later = (self.kind == COMMIT) & (self.modified_ms > self.snapshot_ms[self.place])
        return np.bincount(self.place[later], minlength=len(self.shards))

    @cached_property
    def lag_ms(self) -> Column:
        """Each shard's time from its newest snapshot, or its first commit, to its newest commit."""
        far = np.iinfo(np.int64).max
        first = np.full(len(self.shards), far)
        commits = self.kind == COMMIT
        np.minimum.at(first, self.place[commits], self.modified_ms[commits])
        since = np.where(self.snapshot_ms > 0, self.snapshot_ms, first)
        return np.where(self.lag > 0, np.maximum(self.stored_ms - since, 0), 0)

    @cached_property
    def recent_bytes(self) -> Column:
        """Bytes of each shard's commits in the hour before the operator's newest object."""
        return self._sum((self.kind == COMMIT) & (self.modified_ms > self.newest_ms - HOUR_MS))

    def _sum(self, rows: NDArray[np.bool_]) -> Column:
        sums = np.zeros(len(self.shards), np.int64)
        np.add.at(sums, self.place[rows], self.size_bytes[rows])
        return sums

    def _greatest(self, values: Column, rows: NDArray[np.bool_]) -> Column:
        found = np.zeros(len(self.shards), np.int64)
        np.maximum.at(found, self.place[rows], values[rows])
        return found


def number_of(prefix: str) -> int:
    """Return the number of the shard at a prefix."""
    return int(prefix.rpartition("-")[2])


def _bounded(value: int) -> int:
    """Return a number that fits the column; a store may say anything."""
    return min(value, 1 << 62)
