"""Which query, run and micro-batch a task belongs to, and its durable storage.

Spark sets the first three as local properties of its own thread only. An action in a user's thread inside
``foreachBatch``, or over Spark Connect, has none of them, and ``setJobGroup`` overwrites the run id. Where a task finds
each:

==============  =========================  ====================================================================
                in Spark's own thread      elsewhere
==============  =========================  ====================================================================
query           ``sql.streaming.queryId``  the shard's pointer, which keeps it; else the run that began the shard
run             the session that Spark clones for each start of a query: its id is in the tags that Spark gives
                SQL jobs, in threads and over Connect too
micro-batch     ``streaming.sql.batchId``  unknown; the version is the one after the pointer's
its time        Spark's processing time, which is part of the plan: the same whoever evaluates the micro-batch
==============  =========================  ====================================================================

A job outside SQL (``rows.rdd`` in a thread), or of another session, reveals nothing. The id of the operator's
definition, which travels with the plan, then stands in for the run's, and with the micro-batch's time for the
query's; such a task makes no claim and begins no shard that other tasks might begin too.

A storage is opened once per process, as are the threads for its requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from pyspark import TaskContext

from holdfast.settings import PREFIX, STORAGE_PREFIX, Settings
from holdfast.snapshotter.fields import QUERY_ID
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import CREDENTIALS
from holdfast.spark_integration.executor.processes import STORAGES, kept_per_process
from holdfast.spark_integration.spark_versions import state_partitions

#: Local properties that Spark sets: the id of the query, the number of the micro-batch.
QUERY_PROPERTY, BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"
_EXECUTION, _TAGS = "spark.sql.execution.root.id", "spark.job.tags"
_SESSION_TAG = re.compile(r"spark-session-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-execution-root-id-(\d+)")
_IO_THREADS = 8


@dataclass(frozen=True)
class StreamingTask:
    """The micro-batch that a task belongs to."""

    query_id: str  #: The same after every restart of the query, for a shard with a pointer
    run_id: str  #: New with every start, if known
    is_run_known: bool
    batch_id: int | None  #: None if unknown
    #: Number of partitions of Spark's state, as pinned in the query's offset log; None if unknown
    partitions: int | None
    #: The query's id as Spark tells it here: a clone's own, while `query_id` is the original's; None if unknown
    spark_id: str | None = None

    @classmethod
    def current(cls, definition_id: str, pinned_query_id: str | None, batch_ms: int) -> StreamingTask:
        """Return the micro-batch of the running task."""
        context = TaskContext.get()

        def property_of(name: str) -> str:
            return (context.getLocalProperty(name) if context else None) or ""

        query_id = property_of(QUERY_PROPERTY) if QUERY_ID.fullmatch(property_of(QUERY_PROPERTY)) else None
        partitions = state_partitions(property_of, in_sparks_thread=query_id is not None)
        run_id = _run_id(property_of) if query_id or partitions else None
        return cls(
            # One data frame may be started as two queries, whose definition is the same.
            query_id=pinned_query_id or query_id or run_id or f"{definition_id}-{batch_ms}",
            run_id=run_id or definition_id,
            is_run_known=run_id is not None,
            batch_id=_number(property_of(BATCH_PROPERTY)) if query_id else None,
            partitions=partitions,
            spark_id=query_id,
        )


def current_batch_id() -> int | None:
    """Return the micro-batch that the running task is sure to belong to; None if unknown."""
    context = TaskContext.get()
    is_sparks = context is not None and QUERY_ID.fullmatch(context.getLocalProperty(QUERY_PROPERTY) or "")
    return _number(context.getLocalProperty(BATCH_PROPERTY) or "") if context and is_sparks else None


@contextmanager
def noted(operator: str, place: str) -> Iterator[None]:
    """Add a note to an error that says where it was raised, in a form that `holdfast.explain` reads."""
    try:
        yield
    except Exception as exc:
        batch_id = current_batch_id()
        batch = "" if batch_id is None else f", micro-batch {batch_id}"
        exc.add_note(f"raised in operator {operator!r}, {place}{batch}")
        raise


def _run_id(property_of: Callable[[str], str]) -> str | None:
    """Return the id of the session of this job's outermost execution, which Spark cloned for the run."""
    sessions = {number: session for session, number in _SESSION_TAG.findall(property_of(_TAGS))}
    return sessions.get(property_of(_EXECUTION))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def storage_options(settings: Settings) -> dict[str, str]:
    """Return the task's ``spark.holdfast.storage.*``; Spark Connect hides secrets, so their usual names are tried."""
    return session_values(STORAGE_PREFIX, {*settings.storage_names, *CREDENTIALS})


def session_values(prefix: str, names: Collection[str]) -> dict[str, str]:
    """Return settings of this task's session by their names behind a prefix; none outside a task."""
    context = TaskContext.get()
    values = {}
    for name in names:
        value = context.getLocalProperty(prefix + name) if context else None
        if value is not None:
            values[name] = value
    return values


def local_dir_of_session() -> str | None:
    """Return this task's ``spark.holdfast.local.dir``, or None."""
    return session_values(PREFIX, ["local.dir"]).get("local.dir") or None


def state_storage(settings: Settings) -> ObjectStorage | None:
    """Return the durable storage of this task, shared by the tasks of this process."""
    return None if settings.state_dir is None else storage_at(settings.state_dir, settings)


def storage_at(url: str, settings: Settings) -> ObjectStorage:
    """Return the storage of this task at a URL, shared by the tasks of this process."""
    return kept_storage(url, tuple(sorted(storage_options(settings).items())))


@kept_per_process(STORAGES)
def kept_storage(url: str, options: tuple[tuple[str, str], ...]) -> ObjectStorage:
    """Return this process's storage for a URL and options; it is never closed."""
    return open_storage(url, dict(options))


@kept_per_process(1)
def io_executor() -> Executor:
    """Return this process's threads for storage requests."""
    return ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="holdfast-io")
