"""A sink as a data source: a stream writer for Spark that commits each micro-batch in two phases.

::

    process            what Spark calls                          what it does
    driver, planning   SinkSource(options).streamWriter(…)       begin: settle the last decision, abort leftovers
    workers            writer.write(rows), the writer pickled    write and prepare; nothing if already decided
    driver, ending     SinkSource, pickled, .streamWriter(…)
                       .commit(messages, batch)                  confirm, store the decision, commit
                       .abort(messages, batch)                   abort what was prepared

Spark repeats this for each micro-batch. On the driver it uses separate Python processes without a session, and does not
tell them the query or micro-batch while planning: the sink reads both from the query's checkpoint location, and the
writer and its messages carry them. Each micro-batch therefore starts a coordinator; `exactly_once` keeps one for all.

Spark looks up formats and creates their sources in a separate process: this module imports neither pandas nor a
target's client.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, WriterCommitMessage

from holdfast.backends.registry import backend_names
from holdfast.distribution import needs_extra
from holdfast.errors import InvalidArgumentError
from holdfast.settings import PREFIX, RETAINED, SINK_PREFIX, STORAGE_PREFIX, Settings
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.shard.task import BATCH_PROPERTY
from holdfast.spark_integration.sinks.coordinator import Coordinator
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.exactly_once import (
    decisions_storage,
    session_configuration,
    sink_options,
    warn_of_other_sinks,
)
from holdfast.spark_integration.sinks.files.parquet import ParquetSink
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery, TwoPhaseSink
from holdfast.spark_integration.sinks.writing import prepared_of, write_attempt
from holdfast.spark_integration.spark_state.query_location import QueryLocation
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.spark_versions import require_arrow_streams, stream_arrow_writer
from holdfast.spark_integration.state_source.source import STORAGE, STORAGE_IN_JSON, StateSource, storage_options
from holdfast.spark_integration.state_source.source import in_json as parsed_json
from holdfast.spark_integration.transport.python_stage import ImmediateAcks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

STATE_DIR = PREFIX + "state.dir"
#: A JSON object of sink options whose names have capitals: Spark passes names in lower case.
SINK_IN_JSON = "sink"
_LOCATION, _REPLACES = "checkpointlocation", "replaces"
#: Catches credentials among client options that the sink does not know.
_SECRET_NAME = re.compile(
    r"(?i)(secret|passw(or)?d|passphrase|token|credential|authorization|cookie|connection_?string|(^|[._])sas([._]|$)|"
    r"(access|account|master|sas)_?key|\.pem)(?!.*(url|location|file)$)"
)
_SparksWriter: Any = stream_arrow_writer()
_FileSink = TypeVar("_FileSink", ParquetSink, DeltaSink)


@dataclass(frozen=True)
class SourceOptions:
    """A stream's parsed options."""

    location: str  #: Spark's checkpoint location of the query
    replaces: str | None
    settings: Mapping[str, str] = field(repr=False)  #: The session settings given as options
    sink: Mapping[str, str] = field(repr=False)  #: The sink's options

    @classmethod
    def parse(cls, given: Mapping[str, str], sink: TwoPhaseSink, arguments: Collection[str]) -> Self:
        """Parse a stream's options, whose names ignore case; skip the sink's `arguments`.

        Raises `InvalidArgumentError` if the checkpoint location or the state directory is missing, or for an unknown
        option.
        """
        values = {name.lower(): value for name, value in given.items()}
        location, directory = values.pop(_LOCATION, ""), values.pop(STATE_DIR, "")
        if not location:
            raise InvalidArgumentError(
                "the sink needs its query's checkpoint location: set the option checkpointLocation on this stream; a "
                "session setting is not passed to the sink",
                sink=sink.name,
            )
        if not directory:
            raise InvalidArgumentError(
                f"a sink stores its decisions in the state directory: set the option {STATE_DIR}, preferably with all "
                "others through .options(**holdfast.sinks.source_options(spark, sink))",
                sink=sink.name,
            )
        settings = {STATE_DIR: directory}
        retained = values.pop(RETAINED.lower(), None)
        if retained is not None:
            settings[RETAINED] = retained
        for name, value in parsed_json(values.pop(STORAGE_IN_JSON, "{}")).items():
            settings[STORAGE_PREFIX + name] = value
        for name in [name for name in values if name.startswith(STORAGE)]:
            settings[PREFIX + name] = values.pop(name)
        replaces = values.pop(_REPLACES, None)
        taken = {name.lower() for name in arguments}
        options = parsed_json(values.pop(SINK_IN_JSON, "{}"))
        options |= _own({name: value for name, value in values.items() if name not in taken}, sink)
        return cls(location, replaces, settings, options)

    def open_decisions(self) -> tuple[ObjectStorage, int]:
        """Open the decisions' storage, which the caller closes; return it and the number of decisions to keep."""
        return decisions_storage(self._parsed, self.settings), self._parsed.retained_versions

    def open_location(self) -> ObjectStorage:
        """Open the storage of Spark's checkpoint location, which the caller closes."""
        return open_storage(self.location, self._parsed.storage_values(self.settings))

    @cached_property
    def _parsed(self) -> Settings:
        return Settings.parse(self.settings, backend_names())


def _own(values: Mapping[str, str], sink: TwoPhaseSink) -> dict[str, str]:
    """Return the sink's options under the names they have as session settings."""
    prefix, cased = f"{SINK_PREFIX}{sink.name}.".lower(), {name.lower(): name for name in sink.credentials}
    options = {}
    for name, value in values.items():
        if name.startswith(PREFIX) and not name.startswith(prefix):
            raise InvalidArgumentError(
                f"unknown option of a stream's sink: name the sink's options {SINK_PREFIX}{sink.name}.<option> or "
                "<option>, the storage's storage.<option>",
                option=name,
                sink=sink.name,
            )
        option = name.removeprefix(prefix)
        options[cased.get(option, option)] = value
    return options


def source_options(spark: SparkSession, sink: TwoPhaseSink) -> dict[str, str]:
    """Return a session's settings for a sink as options of a stream: ``.options(**source_options(spark, sink))``.

    A data source cannot read settings on the driver, so they are passed as options, including the number of decisions
    to keep, ``spark.sql.streaming.minBatchesToRetain``. Workers read credentials from the session, so set them there.

    Parameters
    ----------
    spark : SparkSession
    sink : TwoPhaseSink
    """
    values = session_configuration(spark, sink)
    warn_of_other_sinks(values, sink.name)
    return options_of(values, sink)


def options_of(values: Mapping[str, str], sink: TwoPhaseSink) -> dict[str, str]:
    """Convert settings to a stream's options; see `source_options`."""
    own = sink_options(values, sink.name)
    known = {name.lower() for name in own} & {name.lower() for name in sink.credentials}
    in_json = {name: own.pop(name) for name in [*own] if name.lower() not in {name, *known}}
    storage = {
        key.removeprefix(STORAGE_PREFIX): value for key, value in values.items() if key.startswith(STORAGE_PREFIX)
    }
    return {
        **{key: values[key] for key in (STATE_DIR, RETAINED) if key in values},
        **storage_options(storage),
        **{f"{SINK_PREFIX}{sink.name}.{name}": value for name, value in own.items()},
        **({SINK_IN_JSON: json.dumps(in_json)} if in_json else {}),
    }


class SinkSource(DataSource):
    """A data source that writes to a `TwoPhaseSink`; a subclass creates the sink and names the format.

    ::

        class CsvFolders(SinkSource):
            arguments = ("path",)

            @classmethod
            def name(cls):
                return "csv-folder"

            def sink(self):
                return CsvFolder(self.options["path"])

    Attributes
    ----------
    arguments : sequence of str
        Names of the options that `sink` reads; all others are passed to the sink.
    """

    arguments: ClassVar[Sequence[str]] = ()
    #: Spark plans with a new instance and commits with an unpickled copy.
    _is_unpickled = False

    @abstractmethod
    def sink(self) -> TwoPhaseSink:
        """Return the sink that the options describe."""

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        """Return the writer of a micro-batch; when planning, first abort the last run's leftovers."""
        require_arrow_streams()
        sink = self.sink()
        options = SourceOptions.parse(dict(self.options), sink, self.arguments)
        rows = arrow_schema(schema, f"the rows for sink {sink.name!r}", keep_not_null=False)
        writer = StreamWriter(sink, options, rows)
        if not self._is_unpickled:
            writer.begin()
        return writer

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._is_unpickled = True


@dataclass(frozen=True)
class Begun:
    """A micro-batch that the driver has begun."""

    query_id: str
    batch_id: int
    plan: str  #: Spark's plan for the micro-batch; see `Coordinator.start`
    entry: int  #: `Coordinator.number` after the start
    is_decided: bool  #: Whether it was already decided; its rows are then dropped


@dataclass
class Written(WriterCommitMessage):
    """What one task has prepared."""

    partition: int
    rows: int
    handle: str  #: JSON; empty if there were no rows or they were dropped
    begun: Begun


class StreamWriter(ImmediateAcks, _SparksWriter):
    """Writes one micro-batch; pickled for the workers without credentials."""

    def __init__(self, sink: TwoPhaseSink, options: SourceOptions, schema: pa.Schema) -> None:
        self._sink, self._options, self._schema = sink, options, schema
        self._option_names = frozenset({*options.sink, *sink.credentials})
        self._begun: Begun | None = None
        # Without credentials.
        self._query: SinkQuery | None = None

    def begin(self) -> None:
        """On the driver: abort the last run's leftovers, and check whether the micro-batch was decided."""
        with self._options.open_location() as storage:
            location = QueryLocation(storage)
            query_id, newest = location.query_id(), location.newest_planned()
            planned = None if newest is None else location.planned(newest)
        if newest is None or planned is None:
            raise InvalidArgumentError(
                "Spark's log at checkpointLocation has no planned micro-batch: check the option",
                location=self._options.location,
            )
        with self._coordinator(query_id) as (coordinator, query):
            coordinator.start(newest, self._schema, planned.plan)
            self._begun = Begun(query_id, newest, planned.plan, coordinator.number, coordinator.is_decided(newest))
        self._query = replace(query, options=_without(query.options, self._sink.credentials))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write and prepare the rows of a task."""
        context, begun = TaskContext.get(), self._begun
        assert context is not None
        assert begun is not None
        assert self._query is not None
        batch_id, partition = int(context.getLocalProperty(BATCH_PROPERTY) or -1), context.partitionId()
        if batch_id != begun.batch_id:
            raise InvalidArgumentError(
                "the option checkpointLocation names another query's location", planned=begun.batch_id, batch=batch_id
            )
        if begun.is_decided:  # the operators upstream must still see all rows
            return Written(partition, sum(rows.num_rows for rows in iterator), "", begun)
        written = write_attempt(self._sink, self._query, self._option_names, batch_id, self._schema, iterator)
        return Written(partition, *written, begun)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver: decide the micro-batch and make it visible."""
        written = [one for one in messages if isinstance(one, Written)]
        if not written:
            return
        begun = written[0].begun
        with self._coordinator(begun.query_id) as (coordinator, _):
            coordinator.resume(begun.entry)
            prepared = prepared_of(written, repeated=False)
            if coordinator.is_decided(batchId) and not prepared.handles:
                coordinator.warn_of_dropped_rows(prepared.rows)
            else:
                coordinator.finish(batchId, prepared, begun.plan)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Abort the prepared parts whose messages arrived; the next start aborts the rest."""
        written = [one for one in messages if isinstance(one, Written)]
        if written and len(written) < len(messages):
            begun = written[0].begun
            with self._coordinator(begun.query_id) as (coordinator, _):
                coordinator.resume(begun.entry)
                coordinator.give_up()

    @contextmanager
    def _coordinator(self, query_id: str) -> Iterator[tuple[Coordinator, SinkQuery]]:
        query = SinkQuery(self._sink.name, query_id, self._options.replaces, self._options.sink)
        decisions, retained = self._options.open_decisions()
        with decisions:
            yield Coordinator(self._sink, query, decisions, retained, location=self._options.location), query

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without credentials and driver-only parts."""
        return self.__dict__ | {"_options": None}


def _without(options: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    hidden = {name.lower() for name in names}
    return {
        name: value for name, value in options.items() if name.lower() not in hidden and not _SECRET_NAME.search(name)
    }


class _Source(SinkSource):
    format_name: ClassVar[str]

    @classmethod
    def name(cls) -> str:
        return cls.format_name

    def _required(self, option: str) -> str:
        value = self.options.get(option, "")
        if not value:
            raise InvalidArgumentError(f"missing option {option}", format=self.name(), needs=", ".join(self.arguments))
        return value

    def _names(self, option: str) -> list[str]:
        return [name.strip() for name in self.options.get(option, "").split(",") if name.strip()]

    def _text(self, option: str, default: object, pattern: str, what: str) -> str:
        """Return an option's value. Raises `InvalidArgumentError` unless it matches; `what` describes the pattern."""
        value = self.options.get(option, str(default)).lower()
        if not re.fullmatch(pattern, value):
            raise InvalidArgumentError(f"the option {option} must be {what}", given=value)
        return value

    def _creates(self) -> bool:
        return self._text("create", "false", "true|false", "true or false") == "true"

    def _with_files(self, sink: _FileSink) -> _FileSink:
        compression = self.options.get("compression", sink.compression)
        file_mb = int(self._text("file_mb", sink.file_mb, "[0-9]{1,9}", "a whole number"))
        return replace(sink, compression=compression, file_mb=file_mb)


class PostgresSource(_Source):
    """``format("holdfast-postgres")``: options ``name``, ``table``, and others of `PostgresSink`."""

    format_name = "holdfast-postgres"
    arguments = ("name", "table", "keys", "create", "schema", "dsn")

    def sink(self) -> TwoPhaseSink:
        with needs_extra("postgres"):
            from holdfast.spark_integration.sinks.postgres.sink import PostgresSink
        name, table = self._required("name"), self._required("table")
        schema, dsn = self.options.get("schema"), self.options.get("dsn", "")
        return PostgresSink(name, table, self._names("keys"), self._creates(), schema, dsn)


class KafkaSource(_Source):
    """``format("holdfast-kafka")``: options ``name``, ``topic``, ``servers`` and ``timeout_s``."""

    format_name = "holdfast-kafka"
    arguments = ("name", "topic", "servers", "timeout_s")

    def sink(self) -> TwoPhaseSink:
        with needs_extra("kafka"):
            from holdfast.spark_integration.sinks.kafka.sink import KafkaSink
        name, topic, servers = self._required("name"), self.options.get("topic"), self.options.get("servers")
        seconds = "a number of seconds, such as 30 or 0.5"
        timeout_s = float(self._text("timeout_s", 30, r"[0-9]{1,9}(\.[0-9]{1,9})?", seconds))
        return KafkaSink(name, topic, servers=servers, timeout_s=timeout_s)


class ParquetSource(_Source):
    """``format("holdfast-parquet")``: options ``name``, ``path``, ``compression`` and ``file_mb``."""

    format_name = "holdfast-parquet"
    arguments = ("name", "path", "compression", "file_mb")

    def sink(self) -> TwoPhaseSink:
        return self._with_files(ParquetSink(self._required("name"), self._required("path")))


class DeltaSource(_Source):
    """``format("holdfast-delta")``: options ``name``, ``path``, and others of `DeltaSink`."""

    format_name = "holdfast-delta"
    arguments = ("name", "path", "keys", "partitionBy", "create", "compression", "file_mb")

    def sink(self) -> TwoPhaseSink:
        keys, partitions = self._names("keys") or None, self._names("partitionBy")
        sink = DeltaSink(self._required("name"), self._required("path"), keys, partitions, self._creates())
        return self._with_files(sink)


SINK_SOURCES = (PostgresSource, KafkaSource, ParquetSource, DeltaSource)


def register(spark: SparkSession) -> None:
    """Register ``format("holdfast")`` and the sinks' formats, unless Spark has found them."""
    from holdfast.spark_integration.state_source.reading import register_source

    for source in (StateSource, *SINK_SOURCES):
        register_source(spark, source)
