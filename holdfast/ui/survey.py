"""The content of a state directory as columns, or the query at a checkpoint location.

`StoredObjects` takes about 40 bytes per object: a million objects fit in memory, and are summed by numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import HoldfastError, NotFoundError
from holdfast.health import OperatorSigns
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.sink_log import SinkState
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.catalogue import OperatorListing, ShardListing, StateSizes, list_begun
from holdfast.spark_integration.spark_state.query_location import QueryLocation

Column = NDArray[np.int64]
KINDS = ("commit", "snapshot", "part", "trouble", "probe", "unknown")
COMMIT, SNAPSHOT, PART, TROUBLE = range(4)
HOUR_MS = 60 * 60_000
#: Upper limit of sinks whose newest decision is read.
_DECISIONS_MAX = 20
#: Upper limit of a value, since a store may report anything.
_LARGEST = 1 << 62


@dataclass(frozen=True)
class StoredObjects:
    """An operator's objects, as listed: one row per object."""

    kind: NDArray[np.int8]  #: Index into `KINDS`
    #: `version` is 0 for objects other than commits and snapshots; `modified_ms` is by the store's clock
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
        # A list of a million tuples would take more memory than all columns.
        flat = np.fromiter((min(value, _LARGEST) for row in rows for value in row), np.int64).reshape(-1, 5)
        kind, shard, version, size_bytes, modified_ms = flat.T
        return cls(kind.astype(np.int8), shard, version, size_bytes, modified_ms, np.unique(shard))

    def __len__(self) -> int:
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
        """Each shard's commits since its newest snapshot, which a restore replays."""
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


def spread(many: int, most: int) -> list[int]:
    """Return at most `most` indexes, spread evenly over `many`."""
    places: list[int] = np.unique(np.linspace(0, many - 1, min(many, most)).astype(int)).tolist()
    return places


def number_of(prefix: str) -> int:
    """Return the number of the shard at a prefix."""
    return int(prefix.rpartition("-")[2])


@dataclass(frozen=True)
class OperatorSurvey:
    """What an operator's directory holds."""

    signs: OperatorSigns  #: Signs of its query's health
    objects: StoredObjects
    state: Column  #: The size of each shard's state, without what only older versions need
    estimated: int  #: The number of estimates in `state`
    other_bytes: int  #: Bytes of objects outside shards

    @property
    def name(self) -> str:
        return self.signs.name

    @property
    def shard_count(self) -> int:
        """The operator's number of shards; if unknown, up to the last with objects."""
        if isinstance(self.signs.record, OperatorRecord):
            return self.signs.record.shards
        return int(self.objects.shards[-1]) + 1 if len(self.objects.shards) else 0

    @property
    def is_unreadable(self) -> bool:
        """Whether its record cannot be read."""
        return isinstance(self.signs.record, HoldfastError)

    @property
    def state_bytes(self) -> int:
        return int(self.state.sum())

    @property
    def stored_bytes(self) -> int:
        return int(self.objects.size_bytes.sum()) + self.other_bytes


@dataclass(frozen=True)
class Survey:
    """What a state directory holds."""

    operators: Mapping[str, OperatorSurvey]
    sinks: tuple[SinkState, ...]
    unknown: int  #: Objects that belong to no operator, with or without a record
    without_record: tuple[str, ...]  #: Folders with shards, but without an operator record
    query_id: str = ""  #: The query whose checkpoint location this is; empty for other locations

    @property
    def is_empty(self) -> bool:
        """Whether neither an operator nor a sink has stored anything."""
        return not (self.query_id or self.operators or self.sinks or self.without_record)

    def operator(self, name: str) -> OperatorSurvey:
        """Return an operator. Raises `NotFoundError` if it does not exist."""
        if name not in self.operators:
            raise NotFoundError("the state directory holds no operator of this name", operator=name)
        return self.operators[name]


def survey(storage: ObjectStorage, sizes: StateSizes, executor: Executor) -> Survey:
    """List a state directory, perhaps an empty one; or recognise a query's checkpoint location."""
    if query_id := QueryLocation(storage).find_id():
        return Survey({}, (), 0, (), query_id)
    listing = list_begun(storage)
    without_record = tuple(listing.without_record())
    foreign = sum(info.key.partition("/")[0] not in without_record for info in listing.unknown)
    signs = executor.map(partial(OperatorSigns.of, storage), listing.operators.values())
    operators = {
        found.name: _operator(found, one, sizes) for found, one in zip(listing.operators.values(), signs, strict=True)
    }
    sinks = [SinkState.read(storage, one) for one in listing.sinks[:_DECISIONS_MAX]]
    sinks += [SinkState(one) for one in listing.sinks[_DECISIONS_MAX:]]
    return Survey(operators, tuple(sinks), foreign, without_record)


def _operator(listing: OperatorListing, signs: OperatorSigns, sizes: StateSizes) -> OperatorSurvey:
    objects, size = StoredObjects.of(listing.shards.values()), sizes.of_operator(listing)
    by_number = {number_of(prefix): state_bytes for prefix, state_bytes in size.of_shards.items()}
    state = np.array([by_number[number] for number in objects.shards.tolist()], np.int64)
    return OperatorSurvey(signs, objects, state, size.estimated, sum(info.size_bytes for info in listing.others))
