"""Stores the checkpoint locations of queries in their state directories.

::

    task: claims ──▶ accumulator ──▶ driver ──▶ the query in its JVM: file:/data/app-spark
                                            ──▶ _queries/<state id>.locations/1

A task gets only its query's id from Spark, and the driver does not know the id when the query is defined. So the task
that makes a claim reports the query to the driver (`holdfast.spark_integration.shard.news`), which looks up the
location. Spark's scheduler delivers the news. It waits up to a second for a query's first note, because a program may
end with its only micro-batch; after a timeout, it never waits again. A thread per query stores the location.

A note helps people find a query. If it cannot be stored, for example without credentials, the query continues.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping

from pyspark import SparkContext
from pyspark.accumulators import Accumulator
from pyspark.sql import SparkSession

from holdfast import clock
from holdfast.errors import HoldfastError
from holdfast.snapshotter.ownership.queries import NotedLocation, note_location
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.shard.news import ActiveQuery, News, NewsParam, packed
from holdfast.spark_integration.spark_state.running_query import running_location

_log = logging.getLogger(__name__)
#: The news and notes of the latest application; a process has only one application at a time.
_active: list[tuple[SparkContext, Accumulator[News], LocationRecorder]] = []
_lock = threading.Lock()
_WAIT_S = 1.0
#: A query's note is checked at most once per interval, however many executors report the query.
_RECHECK_AFTER_MS = 60_000


def news_of(session: SparkSession, state_dir: str, storage_values: Mapping[str, str]) -> bytes:
    """Return the accumulator through which tasks report queries; this process stores their locations."""
    context = session.sparkContext
    with _lock:
        if not _active or _active[0][0] is not context:
            recorder = LocationRecorder(session)
            _active[:] = [(context, context.accumulator(frozenset(), _DriverNewsParam(recorder)), recorder)]
        _, accumulator, recorder = _active[0]
        recorder.options[state_dir] = dict(storage_values)
        return packed(accumulator)


class _DriverNewsParam(NewsParam):
    """The driver's accumulator parameter, which handles the tasks' news; tasks use `NewsParam`."""

    def __init__(self, recorder: LocationRecorder) -> None:
        self._recorder = recorder

    def __reduce__(self) -> tuple[type[NewsParam], tuple[()]]:
        return NewsParam, ()

    def addInPlace(self, value1: News, value2: News) -> News:
        """Pass the news to the recorder and discard it."""
        for query in value2:
            self._recorder.store(query)
        return value1


class LocationRecorder:
    """Stores the locations of an application's queries; restores a note that a different driver has replaced."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._known = set[ActiveQuery]()
        self._noted: dict[ActiveQuery, tuple[str, int]] = {}  #: The noted location and the time of the note
        self._running = set[ActiveQuery]()
        self._wait_s = _WAIT_S
        #: Storage options by state directory, from the latest definition that uses it.
        self.options: dict[str, dict[str, str]] = {}

    def store(self, query: ActiveQuery) -> None:
        """Store a query's location in a thread; wait only for its first note, because this blocks Spark's scheduler."""
        if query in self._running:
            return  # the storage is slow: wait for the next news
        self._running.add(query)
        located = threading.Event()
        thread = threading.Thread(target=self._note, args=(query, located), name="holdfast-note", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no more threads; an exception would stop all accumulators
            self._running.discard(query)
            _log.info("cannot store the location of query %s: %s", query.query_id, exc)
            return
        located.wait(_WAIT_S)  # otherwise, a query that ends with this micro-batch is no longer found
        if query not in self._known:
            self._known.add(query)
            thread.join(self._wait_s)
            if thread.is_alive():
                self._wait_s = 0  # other queries would time out, too

    def _note(self, query: ActiveQuery, located: threading.Event) -> None:
        try:
            location, now_ms = running_location(self._session, query.query_id), clock.monotonic_ms()
            located.set()
            noted, noted_ms = self._noted.get(query, (None, 0))
            if location is None or (location == noted and now_ms - noted_ms < _RECHECK_AFTER_MS):
                return
            with open_storage(query.state_dir, self.options.get(query.state_dir, {})) as storage:
                note_location(storage, NotedLocation(query.state_id, query.query_id, location, socket.gethostname()))
            self._noted[query] = location, now_ms
        except (HoldfastError, RuntimeError) as exc:  # RuntimeError from threads at the program's end
            _log.info("cannot store the location of query %s in its state directory: %s", query.query_id, exc)
        finally:
            located.set()
            self._running.discard(query)
