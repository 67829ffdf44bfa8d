"""What a state directory holds, listed and kept as columns; or whose query's checkpoint location it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import CorruptionError, HoldfastError, NotFoundError
from holdfast.health.records import record_of
from holdfast.health.signs import OperatorSigns
from holdfast.snapshotter.ownership.operator_record import OperatorRecord
from holdfast.snapshotter.sink_log import Entry, SinkLog, StoredSink
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.catalogue import OperatorListing, StateDirListing, list_begun
from holdfast.snapshotter.upkeep.state_size import StateSizes
from holdfast.ui.stored_objects import Column, StoredObjects, number_of

#: Sinks whose newest decision is read.
_DECISIONS_MAX = 20
_METADATA_BYTES_MAX = 1 << 16


@dataclass(frozen=True)
class OperatorSurvey:
    """What an operator's directory holds."""

    name: str
    record: OperatorRecord | HoldfastError  #: The error where it cannot be read
    objects: StoredObjects
    state: Column  #: The size of each shard's state, without what only older versions need
    estimated: int  #: How many of these sizes are estimates
    signs: OperatorSigns  #: Of its query's health
    beside_bytes: int  #: Of the objects beside the shards

    @property
    def shard_count(self) -> int:
        """How many shards the operator has; if unknown, up to the last one that holds anything."""
        if isinstance(self.record, OperatorRecord):
            return self.record.shards
        return int(self.objects.shards[-1]) + 1 if len(self.objects.shards) else 0

    @property
    def is_unreadable(self) -> bool:
        """Whether its record cannot be read."""
        return isinstance(self.record, HoldfastError)

    @property
    def query_id(self) -> str:
        """The query that owns it; empty if unknown."""
        return self.record.query_id if isinstance(self.record, OperatorRecord) else ""

    @property
    def of_query(self) -> str:
        """The query that owns it or, if its record is damaged, that claimed it last; empty if unknown."""
        return self.query_id or self.signs.claimed_by

    @property
    def state_bytes(self) -> int:
        """Bytes of its state."""
        return int(self.state.sum())

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its objects."""
        return int(self.objects.size_bytes.sum()) + self.beside_bytes


@dataclass(frozen=True)
class SinkSurvey:
    """A sink with its newest entry and decision; None if absent or not read."""

    stored: StoredSink
    query_id: str | None = None
    decision: Entry | None = None
    error: str = ""


@dataclass(frozen=True)
class Survey:
    """What a state directory holds."""

    operators: Mapping[str, OperatorSurvey]
    sinks: tuple[SinkSurvey, ...]
    unknown: int  #: Objects that belong to no operator, not even to one without a record
    without_record: tuple[str, ...]  #: Folders with shards, but without an operator record
    query_id: str = ""  #: The query whose checkpoint location this is; empty for other locations

    @property
    def is_empty(self) -> bool:
        """Whether no operator and no sink has stored anything there."""
        return not (self.query_id or self.operators or self.sinks or self.without_record)

    def operator(self, name: str) -> OperatorSurvey:
        """Return an operator. Raises `NotFoundError` if there is none of this name."""
        if name not in self.operators:
            raise NotFoundError("the state directory holds no operator of this name", operator=name)
        return self.operators[name]


def survey(storage: ObjectStorage, sizes: StateSizes) -> Survey:
    """List a state directory, perhaps an empty one; or recognise a query's checkpoint location.

    Raises `NotFoundError`, `InvalidArgumentError` or `UnavailableError` if it holds nothing of holdfast, or cannot be
    listed.

    Notes
    -----
    Cost: one listing, one small request, two for each operator, one for each of the first sinks, and once one for each
    of some snapshots. Memory: about 1 KB an object while it lists, then 33 bytes.
    """
    if query_id := _query_id(storage):
        return Survey({}, (), 0, (), query_id)
    listing = list_begun(storage)
    without_record = tuple(listing.without_record())
    foreign = sum(info.key.partition("/")[0] not in without_record for info in listing.unknown)
    return Survey(_surveyed(storage, listing, sizes), _sinks(storage, listing.sinks), foreign, without_record)


def _query_id(storage: ObjectStorage) -> str:
    """Return the query's id from its checkpoint location; empty for other locations."""
    try:
        found = json.loads(bytes(storage.get("metadata", _METADATA_BYTES_MAX)))
    except (NotFoundError, CorruptionError, ValueError, RecursionError):
        return ""
    query_id = found.get("id") if isinstance(found, dict) else None
    return query_id if isinstance(query_id, str) else ""


def _surveyed(storage: ObjectStorage, listing: StateDirListing, sizes: StateSizes) -> dict[str, OperatorSurvey]:
    return {name: _operator(storage, found, sizes) for name, found in listing.operators.items()}


def _operator(storage: ObjectStorage, listing: OperatorListing, sizes: StateSizes) -> OperatorSurvey:
    record = record_of(storage, listing.name)
    objects, size = StoredObjects.of(listing.shards.values()), sizes.of_operator(listing)
    by_number = {number_of(prefix): state_bytes for prefix, state_bytes in size.of_shards.items()}
    return OperatorSurvey(
        listing.name,
        record,
        objects,
        np.array([by_number[number] for number in objects.shards.tolist()], np.int64),
        size.estimated,
        OperatorSigns.of(storage, listing, record),
        sum(info.size_bytes for info in listing.others),
    )


def _sinks(storage: ObjectStorage, stored: Sequence[StoredSink]) -> tuple[SinkSurvey, ...]:
    read = tuple(_sink(storage, one) for one in stored[:_DECISIONS_MAX])
    return read + tuple(SinkSurvey(one) for one in stored[_DECISIONS_MAX:])


def _sink(storage: ObjectStorage, stored: StoredSink) -> SinkSurvey:
    log = SinkLog(storage, stored.sink)
    try:
        newest = log.read(stored.numbers[-1])
        return SinkSurvey(stored, newest.query_id, log.decision(newest))
    except NotFoundError:  # deleted since it was listed
        return SinkSurvey(stored)
    except CorruptionError as exc:
        return SinkSurvey(stored, error=str(exc))
