"""Finds a task's query, run, micro-batch and durable storage.

Spark sets the first three as local properties, but only in its own thread. An action in a user's thread inside
``foreachBatch``, or over Spark Connect, has none of them, and ``setJobGroup`` overwrites the run id. A task finds them
as follows:

==============  =========================  ====================================================================
                in Spark's own thread      elsewhere
==============  =========================  ====================================================================
query           ``sql.streaming.queryId``  the shard's pointer; without a pointer, the run's id is used
run             the session that Spark clones for each start of a query: Spark adds its id to the tags of SQL jobs,
                also in threads and over Connect
micro-batch     ``streaming.sql.batchId``  unknown; the next version follows the pointer's
its time        Spark's processing time, which is part of the plan: equal in all evaluations of the micro-batch
==============  =========================  ====================================================================

A job outside SQL (``rows.rdd`` in a thread), or in a different session, has neither. The id of the operator's
definition, which is part of the plan, then replaces the run's id and, with the micro-batch's time, the query's id. Such
a task makes no claim, and starts no shard that other tasks may start, too.

Each process opens a storage, and the thread pool for its requests, only once.
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

#: Local properties that Spark sets: the query's id and the micro-batch's id.
QUERY_PROPERTY, BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"
_EXECUTION, _TAGS = "spark.sql.execution.root.id", "spark.job.tags"
_SESSION_TAG = re.compile(r"spark-session-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-execution-root-id-(\d+)")
_IO_THREADS = 8


@dataclass(frozen=True)
class StreamingTask:
    """A task's query, run and micro-batch."""

    query_id: str  #: For a shard with a pointer, constant over restarts of the query
    run_id: str  #: If known, new for every start of the query
    is_run_known: bool
    batch_id: int | None  #: None if unknown
    #: Number of partitions of Spark's state, as pinned in the query's offset log; None if unknown
    partitions: int | None
    #: Spark's id of the query: for a clone, its own id, while `query_id` is the original's; None if unknown
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
            # A DataFrame may be started as two queries, which share the definition.
            query_id=pinned_query_id or query_id or run_id or f"{definition_id}-{batch_ms}",
            run_id=run_id or definition_id,
            is_run_known=run_id is not None,
            batch_id=_number(property_of(BATCH_PROPERTY)) if query_id else None,
            partitions=partitions,
            spark_id=query_id,
        )


def current_batch_id() -> int | None:
    """Return the id of the running task's micro-batch; None if unknown."""
    context = TaskContext.get()
    is_sparks = context is not None and QUERY_ID.fullmatch(context.getLocalProperty(QUERY_PROPERTY) or "")
    return _number(context.getLocalProperty(BATCH_PROPERTY) or "") if context and is_sparks else None


@contextmanager
def noted(operator: str, place: str) -> Iterator[None]:
    """Add a note to errors with the operator, the place and the micro-batch; `holdfast.explain` parses it."""
    try:
        yield
    except Exception as exc:
        batch_id = current_batch_id()
        batch = "" if batch_id is None else f", micro-batch {batch_id}"
        exc.add_note(f"raised in operator {operator!r}, {place}{batch}")
        raise


def _run_id(property_of: Callable[[str], str]) -> str | None:
    """Return the id of the session that Spark cloned for the run, from this job's outermost execution."""
    sessions = {number: session for session, number in _SESSION_TAG.findall(property_of(_TAGS))}
    return sessions.get(property_of(_EXECUTION))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def storage_options(settings: Settings) -> dict[str, str]:
    """Return the task's ``spark.holdfast.storage.*`` settings, and known secrets, which Spark Connect hides."""
    return session_values(STORAGE_PREFIX, {*settings.storage_names, *CREDENTIALS})


def session_values(prefix: str, names: Collection[str]) -> dict[str, str]:
    """Return the settings of this task's session by name without the prefix; empty outside a task."""
    context = TaskContext.get()
    values = {}
    for name in names:
        value = context.getLocalProperty(prefix + name) if context else None
        if value is not None:
            values[name] = value
    return values


def local_dir_of_session() -> str | None:
    """Return the session's ``spark.holdfast.local.dir``, or None."""
    return session_values(PREFIX, ["local.dir"]).get("local.dir") or None


def state_storage(settings: Settings) -> ObjectStorage | None:
    """Return this task's durable storage, shared by the tasks of this process; None without a state directory."""
    return None if settings.state_dir is None else storage_at(settings.state_dir, settings)


def storage_at(url: str, settings: Settings) -> ObjectStorage:
    """Return the storage at a URL with this task's options, shared by the tasks of this process."""
    return kept_storage(url, tuple(sorted(storage_options(settings).items())))


@kept_per_process(STORAGES)
def kept_storage(url: str, options: tuple[tuple[str, str], ...]) -> ObjectStorage:
    """Return this process's storage for a URL and options; it is never closed."""
    return open_storage(url, dict(options))


@kept_per_process(1)
def io_executor() -> Executor:
    """Return this process's thread pool for storage requests."""
    return ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="holdfast-io")
