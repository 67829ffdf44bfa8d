"""What a checkpoint directory holds, listed now and then, and kept as columns.

A listing of a large directory takes long and costs requests. So each is shown to all who ask within some seconds, and
the longer it took, the longer it is shown; whoever asks later gets the old one, with its age, while the next one is
made. Nothing is listed while nobody asks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass

from holdfast import clock
from holdfast.errors import CorruptionError, HoldfastError, NotFoundError
from holdfast.snapshotter.decisions import StoredSink
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, read_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.catalogue import CheckpointListing, OperatorListing, list_begun
from holdfast.ui.stored_objects import StoredObjects

SHOWN_MS = 3_000
#: Of the time that passes, listings take at most one part in so many.
_REST = 10
#: How long somebody who asks waits for a newer one.
PATIENCE_S = 2.0
TROUBLES_MAX = 20
_METADATA_BYTES_MAX = 1 << 16


@dataclass(frozen=True)
class OperatorSurvey:
    """What an operator's directory holds.

    Attributes
    ----------
    name : str
    record : OperatorRecord or HoldfastError
        The error where it cannot be read.
    objects : StoredObjects
    troubles : tuple of (int, str, str)
        The newest reports of failures: when, the shard's prefix, and the key below it.
    trouble_count : int
    beside_bytes : int
        Of what lies beside the shards.
    """

    name: str
    record: OperatorRecord | HoldfastError
    objects: StoredObjects
    troubles: tuple[tuple[int, str, str], ...]
    trouble_count: int
    beside_bytes: int

    @property
    def shard_count(self) -> int:
        """How many shards the operator has; where that is not known, the number of the last one that holds anything."""
        if isinstance(self.record, OperatorRecord):
            return self.record.shards
        return int(self.objects.shards[-1]) + 1 if len(self.objects.shards) else 0

    @property
    def query_id(self) -> str:
        """The query that owns it; empty where that is not known."""
        return self.record.query_id if isinstance(self.record, OperatorRecord) else ""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its objects."""
        return int(self.objects.size_bytes.sum()) + self.beside_bytes


@dataclass(frozen=True)
class Survey:
    """What a checkpoint directory holds.

    Attributes
    ----------
    operators : mapping of str to OperatorSurvey
    sinks : tuple of StoredSink
    unknown : int
        Objects that belong to no operator, not even to one without a record.
    without_record : tuple of str
        Folders with shards, but without an operator record.
    query_id : str
        Of the query whose checkpoint location this is; empty for what is no such location.
    """

    operators: Mapping[str, OperatorSurvey]
    sinks: tuple[StoredSink, ...]
    unknown: int
    without_record: tuple[str, ...]
    query_id: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether no operator and no sink has stored anything there."""
        return not (self.query_id or self.operators or self.sinks or self.without_record)

    def operator(self, name: str) -> OperatorSurvey:
        """Return an operator.

        Raises
        ------
        NotFoundError
            There is none of this name.
        """
        if name not in self.operators:
            raise NotFoundError("the checkpoint directory holds no operator of this name", operator=name)
        return self.operators[name]


def survey(storage: ObjectStorage) -> Survey:
    """List a checkpoint directory, perhaps an empty one; or tell that it is a query's checkpoint location.

    Raises
    ------
    NotFoundError, InvalidArgumentError, UnavailableError
        It holds nothing of holdfast, or cannot be listed.

    Notes
    -----
    Cost: one listing, and one small request for each operator and another one. Memory: while it lists, about 1 KB an
    object; then 33 bytes.
    """
    if query_id := _query_id(storage):
        return Survey({}, (), 0, (), query_id)
    listing = list_begun(storage)
    without_record = tuple(listing.without_record())
    foreign = sum(info.key.partition("/")[0] not in without_record for info in listing.unknown)
    return Survey(_surveyed(storage, listing), listing.sinks, foreign, without_record)


def _query_id(storage: ObjectStorage) -> str:
    """Return what Spark's checkpoint location of a query says is the query's id; nothing if this is none."""
    try:
        found = json.loads(bytes(storage.get("metadata", _METADATA_BYTES_MAX)))
    except (NotFoundError, CorruptionError, ValueError, RecursionError):
        return ""
    query_id = found.get("id") if isinstance(found, dict) else None
    return query_id if isinstance(query_id, str) else ""


def _surveyed(storage: ObjectStorage, listing: CheckpointListing) -> dict[str, OperatorSurvey]:
    return {name: _operator(storage, found) for name, found in listing.operators.items()}


def _operator(storage: ObjectStorage, listing: OperatorListing) -> OperatorSurvey:
    try:
        record: OperatorRecord | HoldfastError = read_operator(storage, listing.name)
    except (CorruptionError, NotFoundError) as exc:
        record = exc
    told = sorted(((o.modified_ms, s.prefix, o.key) for s in listing.shards.values() for o in s.troubles), reverse=True)
    return OperatorSurvey(
        listing.name,
        record,
        StoredObjects.of(listing.shards.values()),
        tuple(told[:TROUBLES_MAX]),
        len(told),
        sum(info.size_bytes for info in listing.others),
    )


@dataclass(frozen=True)
class Dated:
    """A survey, and how old it is.

    Attributes
    ----------
    survey : Survey
    taken_ms : int
        When it was begun, in ms since 1970.
    took_ms : int
    error : HoldfastError or None
        Why there is no newer one.
    """

    survey: Survey
    taken_ms: int
    took_ms: int
    error: HoldfastError | None = None


class Surveyor:
    """Gives the latest survey of a directory.

    Parameters
    ----------
    take : callable
        Makes a survey.
    executor : concurrent.futures.Executor
        Where surveys are made, of which one is made at a time.
    now_ms, monotonic_ms : callable
        The time.

    Notes
    -----
    Threads: any.
    """

    def __init__(
        self,
        take: Callable[[], Survey],
        executor: Executor,
        now_ms: Callable[[], int] = clock.now_ms,
        monotonic_ms: Callable[[], int] = clock.monotonic_ms,
    ) -> None:
        self._take = take
        self._executor = executor
        self._now_ms, self._monotonic_ms = now_ms, monotonic_ms
        self._lock = threading.Lock()
        self._latest: Dated | None = None
        self._error: HoldfastError | None = None
        self._due_ms = 0
        self._running: Future[None] | None = None

    @property
    def known(self) -> Survey | None:
        """What was told last, however old it is; None before the first survey."""
        with self._lock:
            return self._latest.survey if self._latest else None

    def latest(self, patience_s: float = PATIENCE_S) -> Dated:
        """Return the latest survey, perhaps a new one.

        Parameters
        ----------
        patience_s : float
            How long to wait for a newer one.

        Raises
        ------
        HoldfastError
            There is none, because of this.
        """
        with self._lock:
            if self._running is None and self._monotonic_ms() >= self._due_ms:
                self._running = self._executor.submit(self._make)
            running, known = self._running, self._latest
        if running is not None:
            done, _ = wait([running], patience_s if known else None)
            for one in done:
                one.result()  # what is no error of holdfast's is none to go on after
        with self._lock:
            if self._latest is None:
                assert self._error is not None
                raise self._error
            found = self._latest
            return Dated(found.survey, found.taken_ms, found.took_ms, self._error)

    def _make(self) -> None:
        begun_ms, taken_ms = self._monotonic_ms(), self._now_ms()
        found, error = None, None
        try:
            found = self._take()
        except HoldfastError as exc:
            error = exc
        finally:
            took_ms = self._monotonic_ms() - begun_ms
            with self._lock:
                self._running = None
                self._due_ms = begun_ms + took_ms + max(SHOWN_MS, _REST * took_ms)
                self._error = error
                if found is not None:
                    self._latest = Dated(found, taken_ms, took_ms)
