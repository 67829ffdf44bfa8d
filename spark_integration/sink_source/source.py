"""A sink as a data source: Spark's writer of a stream, which runs the two-phase commit of each micro-batch.

::

    process            what Spark calls                          what is done
    driver, planning   SinkSource(options).streamWriter(…)       begin: settle the last decision, abort leftovers
    workers            writer.write(rows), the writer pickled    write and prepare; nothing if it was decided before
    driver, ending     SinkSource, pickled, .streamWriter(…)
                       .commit(messages, batch)                  confirm, store the decision, commit
                       .abort(messages, batch)                   abort what was prepared

Spark does so for each micro-batch, on the driver in Python processes that share nothing, have no session, and are told
neither query nor micro-batch when they plan: both are read from the query's checkpoint location. So each micro-batch is
a start of the coordinator, with what that costs; `exactly_once` keeps one over the micro-batches.
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
from holdfast.spark_integration.shard.streaming_task import BATCH_PROPERTY
from holdfast.spark_integration.sink_source.options import SourceOptions
from holdfast.spark_integration.sinks.coordinator import Coordinator
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery, TwoPhaseSink
from holdfast.spark_integration.sinks.writing import prepared_of, write_attempt
from holdfast.spark_integration.spark_state.query_location import QueryLocation
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.spark_versions import require_arrow_streams, stream_arrow_writer

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
        """Return the writer of a micro-batch; before its tasks, end what the last run has left."""
        require_arrow_streams()
        sink = self.sink()
        options = SourceOptions.parse(dict(self.options), sink, self.arguments)
        rows = arrow_schema(schema, f"the rows for sink {sink.name!r}", keep_not_null=False)
        writer = StreamWriter(sink, options, rows)
        if not self._has_travelled:
            writer.begin()
        return writer

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was pickled."""
        self.__dict__.update(state)
        self._has_travelled = True


@dataclass
class Written(WriterCommitMessage):
    """What one task has prepared.

    Attributes
    ----------
    partition, rows : int
    handle : str
        As JSON; empty if there were no rows, or if they were dropped.
    """

    partition: int
    rows: int
    handle: str


class StreamWriter(_SparksWriter):
    """Writes one micro-batch; travels to the workers without credentials.

    Parameters
    ----------
    sink : TwoPhaseSink
    options : SourceOptions
    schema : pyarrow.Schema
    """

    def __init__(self, sink: TwoPhaseSink, options: SourceOptions, schema: pa.Schema) -> None:
        self._sink, self._options, self._schema = sink, options, schema
        self._query: SinkQuery | None = None
        self._option_names = frozenset({*options.sink, *sink.credentials})
        self._batch_id: int | None = None
        self._is_decided = False

    def begin(self) -> None:
        """End what the last run has left, and find out whether the micro-batch was decided; on the driver."""
        with self._coordinator() as (coordinator, query, newest):
            if newest is None:
                raise InvalidArgumentError("the query has planned no micro-batch", location=self._options.location)
            coordinator.start(newest, self._schema)
            self._is_decided = coordinator.is_decided(newest)
            self._query, self._batch_id = query, newest

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write and prepare the rows of a task."""
        context = TaskContext.get()
        assert context is not None
        assert self._query is not None
        batch_id, partition = int(context.getLocalProperty(BATCH_PROPERTY) or -1), context.partitionId()
        if batch_id != self._batch_id:
            raise InvalidArgumentError(
                "the option checkpointLocation names another query's location", planned=self._batch_id, batch=batch_id
            )
        if self._is_decided:  # the operators before it must have seen all rows
            return Written(partition, sum(rows.num_rows for rows in iterator), "")
        written = write_attempt(self._sink, self._query, self._option_names, batch_id, self._schema, iterator)
        return Written(partition, *written)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Decide the micro-batch and make it visible; on the driver."""
        with self._coordinator() as (coordinator, _, _):
            coordinator.resume()
            prepared = prepared_of([one for one in messages if isinstance(one, Written)], repeated=False)
            if coordinator.is_decided(batchId) and not prepared.handles:
                coordinator.tell_of_dropped(prepared.rows)
            else:
                coordinator.finish(batchId, prepared)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Give up what was prepared of a micro-batch that failed; on the driver.

        Spark also calls it where `commit` has failed, perhaps after the decision: then no message is missing, and the
        next start ends what there is.
        """
        if all(isinstance(message, Written) for message in messages):
            return
        with self._coordinator() as (coordinator, _, _):
            coordinator.resume()
            coordinator.give_up(batchId)

    @contextmanager
    def _coordinator(self) -> Iterator[tuple[Coordinator, SinkQuery, int | None]]:
        """Yield a coordinator, the query, and the newest micro-batch that Spark has planned."""
        with self._options.open_location() as storage:
            location = QueryLocation(storage)
            query_id, newest = location.query_id(), location.newest_planned()
        query = SinkQuery(self._sink.name, query_id, self._options.replaces, self._options.sink)
        decisions, retained = self._options.open_decisions()
        with decisions:
            yield Coordinator(self._sink, query, decisions, retained), query, newest

    def __getstate__(self) -> dict[str, Any]:
        """Return what may travel: no credentials, and nothing of the driver's."""
        query = self._query and replace(self._query, options=_without(self._query.options, self._sink.credentials))
        return {**self.__dict__, "_options": None, "_query": query}


def _without(options: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    hidden = {name.lower() for name in names}
    return {
        name: value for name, value in options.items() if name.lower() not in hidden and not _SECRET_NAME.search(name)
    }
