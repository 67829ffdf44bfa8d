"""A named location, presumably a state directory, with the queries whose state lies there.

A location of a query may be deleted, and another query begin there, while somebody reads. The last reader then closes
the query.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

from holdfast.errors import HoldfastError, NotFoundError
from holdfast.health.health import origin_of
from holdfast.snapshotter.ownership.query_origin import QueryOrigin
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.upkeep.catalogue import StateSizes
from holdfast.spark_integration.lookup.stored_query import StoredQuery
from holdfast.spark_integration.shard.pointer_row import operator_of
from holdfast.spark_integration.spark_state.query_location import BatchTimes
from holdfast.ui.inquiry import Inquiry, Patience, answers
from holdfast.ui.survey import Survey, survey
from holdfast.ui.views.heat_map import RowCounter
from holdfast.ui.views.time_line import GrowthReader

_T = TypeVar("_T")
_ORIGINS = 256
_EMPTY = (
    "Empty, or it does not exist: check the spelling. A state directory fills when a query commits with "
    "spark.holdfast.state.dir set to it, and a checkpointLocation when its query starts."
)


@dataclass(frozen=True)
class Pointers:
    """What a checkpoint location says."""

    log: tuple[BatchTimes, ...]  #: When the micro-batches that are logged were planned and committed, ascending
    #: The operators' directories that the pointers name, and the query of each by the pointers
    named: Mapping[str, str]
    query_id: str

    @property
    def planned(self) -> int | None:
        """The last planned micro-batch."""
        return self.log[-1].batch_id if self.log else None

    @property
    def batches(self) -> list[int]:
        """The committed micro-batches, ascending."""
        return [one.batch_id for one in self.log if one.committed_ms is not None]


@dataclass(frozen=True)
class Progress:
    """How far a query is."""

    batches: list[int]  #: The retained micro-batches, ascending
    batch_ms: int  #: When the last committed one was planned; 0 if no pointer says
    operators: str  #: Their names


class NamedQuery:
    """A query, for as long as its location is the one of this query. Safe for many threads.

    `stored`: closed by this; `progress`: asks the directory that has its state, too.
    """

    def __init__(self, location: str, stored: StoredQuery, surveys: Executor) -> None:
        self.location = location
        self.pointers: Inquiry[Pointers] = Inquiry(partial(self._read, self._pointers), surveys, location)
        self.progress = Inquiry(partial(self._read, _progress), surveys, location)
        self._stored, self._surveys = stored, surveys
        self._lock = threading.Lock()
        self._readers = 0
        self._is_left = False

    @contextmanager
    def reading(self) -> Iterator[StoredQuery]:
        """Keep it open meanwhile. Raises `NotFoundError` if it was left."""
        with self._lock:
            if self._is_left:
                raise NotFoundError(
                    "this checkpoint location was deleted, or another query has begun there", location=self.location
                )
            self._readers += 1
        try:
            yield self._stored
        finally:
            with self._lock:
                self._readers -= 1
                is_last = self._is_unread()
            if is_last:
                self._close()

    def leave(self) -> None:
        """Close the query once its last reader has left."""
        with self._lock:
            is_last = not self._is_left and not self._readers
            self._is_left = True
        if is_last:
            self._close()

    def _is_unread(self) -> bool:
        return self._is_left and not self._readers

    def _close(self) -> None:
        self._surveys.submit(self._stored.close)  # which waits for requests that others have given up

    def _pointers(self, stored: StoredQuery) -> Pointers:
        """Read only new pointers: they are in many small files, and never change."""
        found, known = Pointers(tuple(stored.times()), {}, stored.query_id), self.pointers.known
        if not found.batches:
            return found
        is_known = known is not None and known.named and known.batches[-1:] == found.batches[-1:]
        return replace(found, named=known.named if known and is_known else stored.directories())

    def _read(self, read: Callable[[StoredQuery], _T]) -> _T:
        with self.reading() as stored:
            return read(stored)


def _progress(stored: StoredQuery) -> Progress:
    operators, batches = stored.operators(), stored.batches()
    planned = [row.batch_ms for one in operators for rows in one.pointers.values() for row in rows]
    names = ", ".join(sorted(one.name for one in operators))
    return Progress(batches, max(planned, default=0), names)


@dataclass(frozen=True)
class Awaited:
    """A location that shows nothing yet."""

    location: str
    what: str  #: What is awaited, or what is wrong, in a sentence
    is_wrong: bool = False  #: Whether waiting does not help


@dataclass(frozen=True)
class Directory:
    """A named location, presumably a state directory."""

    place: int  #: In the order in which they were given; part of URLs
    location: str  #: As it was given
    storage: ObjectStorage
    origin_of: Callable[[str], QueryOrigin | None]  #: What a query began with, which never changes: read once
    executor: Executor  #: For requests side by side
    surveys: Executor  #: For what is asked now and then
    surveyor: Inquiry[Survey]
    growth: GrowthReader
    rows: RowCounter
    queries: tuple[NamedQuery, ...] = ()  #: The named queries whose state lies here

    @classmethod
    def of(cls, place: int, storage: ObjectStorage, executor: Executor, surveys: Executor) -> Directory:
        """Return a directory; `surveys` must not be `executor`, for which a survey may wait."""
        sizes = StateSizes(storage, executor)
        surveyor = Inquiry(partial(survey, storage, sizes), surveys, storage.url)
        growth = GrowthReader(storage, executor, sizes)
        origins = lru_cache(maxsize=_ORIGINS)(partial(origin_of, storage))
        return cls(place, storage.url, storage, origins, executor, surveys, surveyor, growth, RowCounter())

    @property
    def awaited(self) -> Awaited | None:
        """What an empty directory waits for; None if it is not empty, or unknown."""
        known = self.surveyor.known
        return Awaited(self.location, _EMPTY) if known and known.is_empty else None

    def query_of(self, directory: str, patience: Patience) -> tuple[NamedQuery, str] | None:
        """Return the query whose pointers name an operator's directory, and what it calls the operator; or None."""
        failed = None
        pointers = answers({place: one.pointers for place, one in enumerate(self.queries)}, patience)
        for place, told in pointers.items():
            if isinstance(told, HoldfastError):  # which need not be the one
                failed = told
            elif directory in told.found.named:
                return self.queries[place], operator_of(directory) or directory
            else:
                failed = told.error or failed
        if failed:
            raise failed
        return None
