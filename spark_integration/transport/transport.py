"""How rows reach their shard: the seam, and the packed way.

Spark ships state operators' rows one by one; what a shard wants is columns. A transport turns the user's
rows into what Spark shuffles by ``route``, and back into columns inside the shard's call:

* `PackedTransport`: Python splits each Arrow batch by shard and sends a few blobs of Arrow data. One more
  Python stage, no work per row: best for large batches.
* `RowsTransport` (`holdfast.spark_integration.transport.rows`): Spark computes the route and sends the rows as they
  are. No stage before the shuffle: best for small batches.

The way back is another seam: `holdfast.spark_integration.transport.output`. Where Spark drops late rows, it does so
between `Transport.send` and `Transport.receive`, by the event time that travels beside the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from holdfast.spark_integration.transport.routes import routes_of, shards_of
from holdfast.spark_integration.transport.worker_garbage import freeze_modules
from holdfast.spark_integration.transport.worker_socket import read_promptly

HASH = "__holdfast_hash"
ROUTE = "__holdfast_route"
BLOB = "__holdfast_blob"
EVENT_TIME = "__holdfast_event_time"

BLOB_BYTES = 32 << 20


def quoted(name: str) -> Column:
    """Return a column by its bare name, whatever characters that has."""
    return F.col("`" + name.replace("`", "``") + "`")


class Transport(Protocol):
    """Carries rows from a data frame to the shards."""

    def send(self, frame: DataFrame, hashed: Column) -> DataFrame:
        """Return the frame to group by `ROUTE`, on the driver.

        Parameters
        ----------
        frame : DataFrame
            The columns to carry.
        hashed : Column
            The hash of the keys, over columns of `frame`; carried as the last column, `HASH`.

        Notes
        -----
        Spark infers constraints from aliases: an expression over columns once more for each of them that is renamed
        after it, doubling their number with each key. So whatever is computed from the keys stands last.
        """

    @property
    def arrow_schema(self) -> pa.Schema:
        """The columns of the frame sent."""

    def receive(self, chunks: Iterable[pd.DataFrame]) -> Iterator[pa.Table]:
        """Yield the rows of one shard and micro-batch, in a worker."""


@dataclass(frozen=True)
class EventTime:
    """The column that carries the watermark.

    Attributes
    ----------
    field : StructField
    filters_rows : bool
        Whether Spark drops rows that are older than the watermark before they reach their shard, as it does for
        ``EventTimeTimeout``: each row must then travel with its own event time. Otherwise Spark looks for the
        column's metadata only.
    """

    field: StructField
    filters_rows: bool


@dataclass(frozen=True)
class PackedTransport:
    """Rows as Arrow blobs, one or a few for each shard and input partition.

    Attributes
    ----------
    shards : int
    arrow_schema : pyarrow.Schema
        Of the table to receive.
    event_time : EventTime or None
        Its newest value travels beside each blob. Where it filters rows, a blob holds rows of one event time.
    """

    shards: int
    arrow_schema: pa.Schema
    event_time: EventTime | None

    def send(self, frame: DataFrame, hashed: Column) -> DataFrame:
        fields = [StructField(ROUTE, IntegerType()), StructField(BLOB, BinaryType())]
        routes, names = routes_of(self.shards), [*frame.columns, HASH]
        event_time, filters_rows = None, False
        if self.event_time is not None:
            field, filters_rows = self.event_time.field, self.event_time.filters_rows
            fields.append(StructField(EVENT_TIME, field.dataType, metadata=field.metadata))
            event_time = field.name

        def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            freeze_modules()
            named = (batch.rename_columns(names) for batch in read_promptly(batches))
            return pack_rows(named, routes, event_time, cut_by_time=filters_rows)

        # PySpark looks columns up by their bare names, and takes a dot or a backtick in one for syntax.
        columns = [*map(quoted, frame.columns), hashed]
        plain = frame.select(*[column.alias(f"c{i}") for i, column in enumerate(columns)])
        return plain.mapInArrow(pack, StructType(fields))

    def receive(self, chunks: Iterable[pd.DataFrame]) -> Iterator[pa.Table]:
        return (read_blob(blob) for chunk in chunks for blob in chunk[BLOB])


def pack_rows(
    batches: Iterable[pa.RecordBatch], routes: list[int], event_time: str | None, *, cut_by_time: bool = False
) -> Iterator[pa.RecordBatch]:
    """Split batches by shard and yield them as rows of (route, blob[, newest event time]).

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
    routes : list of int
        By shard.
    event_time : str or None
        Name of its column.
    cut_by_time : bool, default False
        Whether each blob is to hold rows of one event time only.
    """
    waiting: list[list[pa.RecordBatch]] = [[] for _ in routes]
    waiting_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        shards = shards_of(batch.column(HASH).to_numpy().view(np.uint64), len(routes))
        # A stable sort of 16-bit numbers is a radix sort; there are never so many shards.
        order = np.argsort(shards.astype(np.uint16), kind="stable")
        sorted_batch = batch.take(pa.array(order))
        bounds = np.searchsorted(shards[order], np.arange(len(routes) + 1))
        for shard in np.flatnonzero(bounds[1:] > bounds[:-1]):
            start, end = int(bounds[shard]), int(bounds[shard + 1])
            waiting[shard].append(sorted_batch.slice(start, end - start))
        waiting_bytes += batch.nbytes
        if waiting_bytes >= BLOB_BYTES * len(routes):
            yield _blobs(waiting, routes, event_time, cut_by_time)
            waiting, waiting_bytes = [[] for _ in routes], 0
    if any(waiting):
        yield _blobs(waiting, routes, event_time, cut_by_time)


def _blobs(
    waiting: list[list[pa.RecordBatch]], routes: list[int], event_time: str | None, cut_by_time: bool
) -> pa.RecordBatch:
    pieces = [(route, batches) for route, batches in zip(routes, waiting, strict=True) if batches]
    if cut_by_time and event_time is not None:
        pieces = [(route, [cut]) for route, batches in pieces for cut in _cut_by_time(batches, event_time)]
    columns: dict[str, Any] = {
        ROUTE: pa.array([route for route, _ in pieces], pa.int32()),
        BLOB: pa.array([write_blob(batches[0].schema, batches) for _, batches in pieces], pa.binary()),
    }
    if event_time is not None:
        newest = [_newest([b.column(event_time) for b in batches]) for _, batches in pieces]
        columns[EVENT_TIME] = pa.concat_arrays(newest)
    return pa.RecordBatch.from_pydict(columns)


def _cut_by_time(batches: list[pa.RecordBatch], event_time: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of each event time as a batch of their own."""
    together = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    moments = moments_of(together.column(event_time)).dictionary_encode(null_encoding="encode").indices.to_numpy()
    order = np.argsort(moments, kind="stable")
    starts = np.flatnonzero(np.diff(moments[order], prepend=-1))
    in_order = together.take(pa.array(order))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        yield in_order.slice(start, end - start)


def _newest(columns: list[pa.Array]) -> pa.Array:
    """Return the newest event time as an array of one; of windows the one that ends last."""
    column = pa.concat_arrays(columns)
    times = moments_of(column)
    place = pc.index(times, pc.max(times)).as_py()
    return column.slice(max(place, 0), 1)


def moments_of(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return what of an event time Spark compares with the watermark: of a window its end."""
    return pc.struct_field(column, "end") if pa.types.is_struct(column.type) else column


def write_blob(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> bytes:
    """Return batches as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read_blob(blob: bytes | bytearray) -> pa.Table:
    """Return what `write_blob` wrote, without copying."""
    return ipc.open_stream(pa.py_buffer(blob)).read_all()
