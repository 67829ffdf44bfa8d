"""Write each micro-batch to a sink exactly once from ``foreachBatch``, in any output mode.

A repeated micro-batch that was already decided is committed again, and its new rows are dropped. The query's operators
still run, because Spark needs their state (Spark 4.1 and later reject a micro-batch whose state was not committed).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.backends.options import nearest_name
from holdfast.backends.registry import backend_names
from holdfast.errors import InvalidArgumentError
from holdfast.settings import PREFIX, SINK_PREFIX, STORAGE_PREFIX, Settings
from holdfast.snapshotter.sink_log import checked_sink
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import CREDENTIALS
from holdfast.spark_integration.executor.processes import ProcessId
from holdfast.spark_integration.shard.task import QUERY_PROPERTY
from holdfast.spark_integration.sinks.coordinator import Coordinator
from holdfast.spark_integration.sinks.two_phase_sink import Handle, ReusingSink, SinkQuery, TwoPhaseSink
from holdfast.spark_integration.sinks.writing import WriteTask, drop_frame, write_frame
from holdfast.spark_integration.spark_state.running_query import RunningQuery, running_location
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.spark_versions import is_classic

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9-]{1,59}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: Names of the sinks that this process has defined.
_defined: set[str] = set()
#: Maps sink name and query id to the run and micro-batch decided last, by any `ExactlyOnce` of the process.
_decided: dict[tuple[str, str], tuple[str, int]] = {}


def exactly_once(sink: TwoPhaseSink, *, replaces: str | None = None, query_name: str | None = None) -> ExactlyOnce:
    """Return a function for ``foreachBatch`` that makes each micro-batch visible in a sink exactly once.

    ::

        totals.writeStream.outputMode("update").foreachBatch(sinks.exactly_once(sink)).start()

    Parameters
    ----------
    sink : TwoPhaseSink
        A sink from `holdfast.sinks`, or a custom sink.
    replaces : str, optional
        The id (``StreamingQuery.id``) of a permanently ended query whose results in the target this query continues.
        May stay set after the first start.
    query_name : str, optional
        Only for Spark Connect, which does not pass the query's id to the function: a name that is unique among the
        sink's queries and stable across restarts. A new checkpoint location needs a new name. At most 59 letters,
        digits and ``-``.

    Returns
    -------
    callable
        Takes a DataFrame and the micro-batch id. A sink error stops the query; the next start resumes it.

    Raises
    ------
    InvalidArgumentError
        `sink` is not a sink, or a name is invalid.

    Notes
    -----
    A micro-batch becomes visible if and only if its decision is stored in ``spark.holdfast.state.dir``, which must be
    set. Its rows are those of the decided attempt, even if a repeat computes others. Queries may share the function.
    """
    if not isinstance(sink, TwoPhaseSink):
        raise InvalidArgumentError("pass a sink from holdfast.sinks, or a TwoPhaseSink", given=type(sink).__name__)
    _defined.add(checked_sink(getattr(sink, "name", None)))
    if query_name is not None and not _NAME.fullmatch(query_name):
        raise InvalidArgumentError("query_name must have 1 to 59 letters, digits and hyphens", query_name=query_name)
    return ExactlyOnce(sink, replaces, query_name)


class ExactlyOnce:
    """The function that `exactly_once` returns."""

    def __init__(self, sink: TwoPhaseSink, replaces: str | None, query_name: str | None) -> None:
        self._sink, self._replaces, self._query_name = sink, replaces, query_name
        self._runs: dict[str, _Run] = {}

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        query_id, run_id = self._query_id(frame.sparkSession), _run_id(frame.sparkSession)
        schema = arrow_schema(frame.schema, f"the rows for sink {self._sink.name!r}", keep_not_null=False)
        # Only the next micro-batch of the same run is sure to follow completed work; all others count as a new start.
        # A new Spark run may have different settings, and another query may have replaced this one.
        run = self._runs.get(query_id)
        if run_id is not None and _decided.get((self._sink.name, query_id)) == (run_id, batch_id):
            raise InvalidArgumentError(
                "this sink was called twice in one micro-batch, and the first call's rows are already decided: pass "
                "the union of both DataFrames, or use a sink for each",
                sink=self._sink.name,
                batch=batch_id,
            )
        if run is not None and (run.run_id, run.next_batch_id) != (run_id, batch_id):
            self._runs.pop(query_id).storage.close()
            run = None
        if run is None:
            run = self._runs[query_id] = _Run(self._sink, query_id, self._replaces, frame.sparkSession, run_id)
        try:
            run.write(frame, schema, batch_id)
        except BaseException:
            self._runs.pop(query_id).storage.close()
            raise
        if run_id is not None and run.coordinator.is_decided(batch_id):
            _decided[self._sink.name, query_id] = run_id, batch_id

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the runs, which hold open storages."""
        return self.__dict__ | {"_runs": {}}

    def _query_id(self, session: SparkSession) -> str:
        if self._query_name is not None:
            return f"name-{self._query_name}"
        query_id = _spark_query_id(session)
        if not query_id:
            raise InvalidArgumentError(
                "the micro-batch's query is unknown: call the function in the thread in which Spark calls "
                "foreachBatch; over Spark Connect, name the query: exactly_once(sink, query_name='…')",
                sink=self._sink.name,
            )
        return query_id


class _Run:
    """Writes the micro-batches of one run of a query."""

    def __init__(
        self, sink: TwoPhaseSink, query_id: str, replaces: str | None, session: SparkSession, run_id: str | None
    ) -> None:
        self.run_id = run_id
        configuration = session_configuration(session, sink)
        settings = Settings.parse(configuration, backend_names())
        options = sink_options(configuration, sink.name)
        warn_of_other_sinks(configuration, sink.name)
        self.storage = decisions_storage(settings, configuration)
        self._sink, self._option_names = sink, frozenset({*options, *sink.credentials})
        self._query = SinkQuery(sink.name, query_id, replaces, options)
        self._speculates = configuration.get("spark.speculation", "false").lower() == "true"
        # Over Connect, a successor process may start while this one is still alive.
        process = ProcessId.of(os.getpid()) if is_classic(session) else None
        spark_query_id = _spark_query_id(session)
        location = running_location(session, spark_query_id) if spark_query_id else None
        self.coordinator = Coordinator(
            sink, self._query, self.storage, settings.retained_versions, process, location=location
        )
        self._running = RunningQuery(session, spark_query_id) if spark_query_id else None
        self.next_batch_id: int | None = None
        self._schema: pa.Schema | None = None
        # A start commits only the newest decision again, so the handles of older decisions are spare.
        self._decided: tuple[Handle, ...] = ()
        self._spares: tuple[Handle, ...] = ()

    def write(self, frame: DataFrame, schema: pa.Schema, batch_id: int) -> None:
        plan = self._running.plan(batch_id) if self._running else ""
        if schema != self._schema:
            # The first micro-batch, or new columns (as from a pivot): check the target.
            self.coordinator.start(batch_id, schema, plan)
            self._schema, self._decided, self._spares = schema, (), ()
        if self.coordinator.is_decided(batch_id):
            self.coordinator.warn_of_dropped_rows(drop_frame(frame))
        else:
            query = SinkQuery(self._query.sink, self._query.query_id, self._query.replaces)
            task = WriteTask(self._sink, query, self._option_names, batch_id, schema, self._spares)
            try:
                prepared = write_frame(frame, task, speculates=self._speculates)
            except BaseException:
                self.coordinator.give_up()
                raise
            self.coordinator.finish(batch_id, prepared, plan)
            if isinstance(self._sink, ReusingSink):
                self._spares = prepared.unused
                if prepared.handles:
                    self._spares += self._decided
                    self._decided = prepared.handles
        self.next_batch_id = batch_id + 1


def _spark_query_id(session: SparkSession) -> str | None:
    """Return Spark's id of the calling query; None over Connect, which does not provide it."""
    return session.sparkContext.getLocalProperty(QUERY_PROPERTY) if is_classic(session) else None


def _run_id(session: SparkSession) -> str | None:
    """Return Spark's run id from the job group; None if the user changed the group."""
    if not is_classic(session):
        return "the only one"  # a process over Connect has one run
    group: str | None = session.sparkContext.getLocalProperty("spark.jobGroup.id")
    return group if group is not None and _UUID.fullmatch(group) else None


def session_configuration(session: SparkSession, sink: TwoPhaseSink) -> dict[str, str]:
    """Return the session's settings, including the credentials that Spark Connect does not list."""
    configuration = dict(session.conf.getAll)
    hidden = [STORAGE_PREFIX + name for name in CREDENTIALS]
    hidden += [f"{SINK_PREFIX}{sink.name}.{name}" for name in sink.credentials]
    if not is_classic(session):
        for name in hidden:
            value = session.conf.get(name, None)
            if value is not None:
                configuration[name] = value
    return configuration


def sink_options(configuration: Mapping[str, str], sink: str) -> dict[str, str]:
    prefix = f"{SINK_PREFIX}{sink}."
    return {name.removeprefix(prefix): value for name, value in configuration.items() if name.startswith(prefix)}


def warn_of_other_sinks(configuration: Mapping[str, str], sink: str) -> None:
    """Warn of settings for undefined sinks: only for similar names if `sink` itself has settings."""
    _defined.add(sink)
    names = {key.removeprefix(SINK_PREFIX).partition(".")[0] for key in configuration if key.startswith(SINK_PREFIX)}
    others = sorted(names - _defined)
    if sink in names:
        others = [name for name in others if nearest_name(name, [sink])]
    for name in others:
        _log.warning(
            "%s%s.* is set, but no sink has this name yet: did you mean %r? The setting has no effect until one has it",
            SINK_PREFIX,
            name,
            sink,
        )


def decisions_storage(settings: Settings, configuration: Mapping[str, str]) -> ObjectStorage:
    """Open the state directory, which stores decisions. Raises `InvalidArgumentError` if none is set."""
    if settings.state_dir is None:
        raise InvalidArgumentError(
            f"a sink stores its decisions in the state directory: set {PREFIX}state.dir to durable storage"
        )
    return open_storage(settings.state_dir, settings.storage_values(configuration))
