"""A sink as a data source: Spark's writer of a stream, which runs the two-phase commit of each micro-batch.

::

    process            what Spark calls                          what is done
    driver, planning   SinkSource(options).streamWriter(…)       begin: settle the last decision, abort leftovers
    workers            writer.write(rows), the writer pickled    write and prepare; nothing if it was decided before
    driver, ending     SinkSource, pickled, .streamWriter(…)
                       .commit(messages, batch)                  confirm, store the decision, commit
                       .abort(messages, batch)                   abort what was prepared

Spark does so for each micro-batch, on the driver in Python processes that share nothing, have no session, and are told
neither query nor micro-batch when they plan: both are read from the query's checkpoint location, once, and travel with
the writer and its messages. So each micro-batch is a start of the coordinator, with what that costs; `exactly_once`
keeps one over the micro-batches.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, WriterCommitMessage

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.shard.task import BATCH_PROPERTY
from holdfast.spark_integration.sink_source.options import SourceOptions
from holdfast.spark_integration.sinks.coordinator import Coordinator
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery, TwoPhaseSink
from holdfast.spark_integration.sinks.writing import prepared_of, write_attempt
from holdfast.spark_integration.spark_state.query_location import QueryLocation
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.spark_versions import require_arrow_streams, stream_arrow_writer
from holdfast.spark_integration.transport.python_stage import ImmediateAcks

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: A sink may not know all options of the client behind it.
_SECRET_NAME = re.compile(
    r"(?i)(secret|passw(or)?d|passphrase|token|credential|authorization|cookie|connection_?string|(^|[._])sas([._]|$)|"
    r"(access|account|master|sas)_?key|\.pem)(?!.*(url|location|file)$)"
)
_SparksWriter: Any = stream_arrow_writer()


class SinkSource(DataSource):
    """A data source that writes to a `TwoPhaseSink`; a subclass makes the sink and names the format.

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
        Names of the options from which `sink` makes the sink; all others are options of the sink.
    """

    arguments: ClassVar[Sequence[str]] = ()
    #: Spark plans with an instance that it has just made, and commits with one that has travelled.
    _has_travelled = False

    @abstractmethod
    def sink(self) -> TwoPhaseSink:
        """Return the sink that the options describe."""

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        """Return the writer of a micro-batch; before its tasks, abort the last run's leftovers."""
        require_arrow_streams()
        sink = self.sink()
        options = SourceOptions.parse(dict(self.options), sink, self.arguments)
        rows = arrow_schema(schema, f"the rows for sink {sink.name!r}", keep_not_null=False)
        writer = StreamWriter(sink, options, rows)
        if not self._has_travelled:
            writer.begin()
        return writer

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pickled state."""
        self.__dict__.update(state)
        self._has_travelled = True


@dataclass(frozen=True)
class Begun:
    """A micro-batch that the driver has begun."""

    query_id: str
    batch_id: int
    plan: str  #: What Spark has planned for it: see `Coordinator.start`
    entry: int  #: The number under which it was begun: `Coordinator.number`
    is_decided: bool  #: Whether it was decided before, so that its rows are dropped


@dataclass
class Written(WriterCommitMessage):
    """What one task has prepared."""

    partition: int
    rows: int
    handle: str  #: As JSON; empty if there were no rows, or if they were dropped
    begun: Begun


class StreamWriter(ImmediateAcks, _SparksWriter):
    """Writes one micro-batch; travels to the workers without credentials."""

    def __init__(self, sink: TwoPhaseSink, options: SourceOptions, schema: pa.Schema) -> None:
        self._sink, self._options, self._schema = sink, options, schema
        self._option_names = frozenset({*options.sink, *sink.credentials})
        self._begun: Begun | None = None
        # Without credentials.
        self._query: SinkQuery | None = None

    def begin(self) -> None:
        """Abort the last run's leftovers, and find out whether the micro-batch was decided; on the driver."""
        with self._options.open_location() as storage:
            location = QueryLocation(storage)
            query_id, newest = location.query_id(), location.newest_planned()
            planned = None if newest is None else location.planned(newest)
        if newest is None or planned is None:
            raise InvalidArgumentError("the query has planned no micro-batch", location=self._options.location)
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
        if begun.is_decided:  # the operators before it must have seen all rows
            return Written(partition, sum(rows.num_rows for rows in iterator), "", begun)
        written = write_attempt(self._sink, self._query, self._option_names, batch_id, self._schema, iterator)
        return Written(partition, *written, begun)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Decide the micro-batch and make it visible; on the driver."""
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
        """Abort what a failed micro-batch prepared, as far as messages tell; the next start does the rest."""
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
        """Return the part that may travel: no credentials, and nothing of the driver's."""
        return self.__dict__ | {"_options": None}


def _without(options: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    hidden = {name.lower() for name in names}
    return {
        name: value for name, value in options.items() if name.lower() not in hidden and not _SECRET_NAME.search(name)
    }
