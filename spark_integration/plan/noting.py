"""Notes the checkpoint locations of a state directory's queries there.

::

    task: claims ──▶ accumulator ──▶ driver ──▶ the query in its JVM: file:/data/app-spark
                                            ──▶ _queries/<state id>.locations/1

Spark tells a task only its query's id, and a driver learns it after the query's start. So the task that claims tells
the driver (`holdfast.spark_integration.shard.news`), which looks the location up. Spark's scheduler hands the news
over; it waits up to a second for a query's first note, because a program may end with its only micro-batch; after one
timeout never again. One thread per query does the rest.

A note helps people find a query. If it cannot be stored, as by a driver without the executors' credentials, the query
continues.
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
from holdfast.spark_integration.shard.news import AtWork, News, NewsParam, packed
from holdfast.spark_integration.spark_state.running_query import running_location

_log = logging.getLogger(__name__)
#: Of the last application, of which a process has one at a time.
_heard: list[tuple[SparkContext, Accumulator[News], Noter]] = []
_lock = threading.Lock()
_WAITED_S = 1.0
#: However many executors tell of a query, its note is looked at once in this time.
_REST_MS = 60_000


def news_of(session: SparkSession, state_dir: str, storage_values: Mapping[str, str]) -> bytes:
    """Return the accumulator with which tasks report their queries; this process notes their locations."""
    context = session.sparkContext
    with _lock:
        if not _heard or _heard[0][0] is not context:
            noter = Noter(session)
            _heard[:] = [(context, context.accumulator(frozenset(), _NewsAtDriver(noter)), noter)]
        _, accumulator, noter = _heard[0]
        noter.options[state_dir] = dict(storage_values)
        return packed(accumulator)


class _NewsAtDriver(NewsParam):
    """The driver's accumulator, to which Spark adds the tasks' news; tasks have a plain one."""

    def __init__(self, noter: Noter) -> None:
        self._noter = noter

    def __reduce__(self) -> tuple[type[NewsParam], tuple[()]]:
        return NewsParam, ()

    def addInPlace(self, value1: News, value2: News) -> News:
        """Pass the news to the noter, and keep none."""
        for query in value2:
            self._noter.hear(query)
        return value1


class Noter:
    """Notes the locations of an application's queries, again if another driver has noted a different one since."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._known = set[AtWork]()
        self._noted: dict[AtWork, tuple[str, int]] = {}  #: Its location, and when it was noted
        self._under_way = set[AtWork]()
        self._waited_s = _WAITED_S
        #: By state directory, its storage, as in the last definition that uses it.
        self.options: dict[str, dict[str, str]] = {}

    def hear(self, query: AtWork) -> None:
        """Note a query's location, soon if it is in the news again; Spark's scheduler waits."""
        if query in self._under_way:
            return  # a slow storage: the next news is soon enough
        self._under_way.add(query)
        looked = threading.Event()
        thread = threading.Thread(target=self._note, args=(query, looked), name="holdfast-note", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no more threads. Raised on, it would end all accumulators of the application
            self._under_way.discard(query)
            _log.info("the location of query %s could not be noted: %s", query.query_id, exc)
            return
        looked.wait(_WAITED_S)  # a query that ends with this micro-batch is known no longer
        if query not in self._known:
            self._known.add(query)
            thread.join(self._waited_s)
            if thread.is_alive():
                self._waited_s = 0  # other queries would time out, too

    def _note(self, query: AtWork, looked: threading.Event) -> None:
        try:
            location, now_ms = running_location(self._session, query.query_id), clock.monotonic_ms()
            looked.set()
            noted, noted_ms = self._noted.get(query, (None, 0))
            if location is None or (location == noted and now_ms - noted_ms < _REST_MS):
                return
            with open_storage(query.state_dir, self.options.get(query.state_dir, {})) as storage:
                note_location(storage, NotedLocation(query.state_id, query.query_id, location, socket.gethostname()))
            self._noted[query] = location, now_ms
        except (HoldfastError, RuntimeError) as exc:  # the latter of threads, when the program ends
            _log.info("the state directory does not note the location of query %s: %s", query.query_id, exc)
        finally:
            looked.set()
            self._under_way.discard(query)
