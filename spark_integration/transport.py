"""How rows reach their shard: the seam, and the packed way.

Spark ships state operators' rows one by one; what a shard wants is columns. A transport turns the user's
rows into what Spark shuffles by ``route``, and back into columns inside the shard's call:

* `PackedTransport`: Python splits each Arrow batch by shard and sends a few blobs of Arrow data. One more
  Python stage, no work per row: best for large batches.
* `RowsTransport` (`holdfast.spark_integration.rows`): Spark computes the route and sends the rows as they
  are. No stage before the shuffle: best for small batches.

Output is always packed: see `pack_output` and `unpack_output`.
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

from holdfast.spark_integration.routes import shards_of
from holdfast.spark_integration.worker_garbage import freeze_modules
from holdfast.spark_integration.worker_socket import read_promptly

HASH = "__holdfast_hash"
ROUTE = "__holdfast_route"
BLOB = "__holdfast_blob"
EVENT_TIME = "__holdfast_event_time"
PACKED_OUTPUT = f"{BLOB} binary"

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

    def receive(self, chunks: Iterable[pd.DataFrame]) -> pa.Table:
        """Return the rows of one shard and micro-batch, in a worker: the columns of the frame sent."""


@dataclass(frozen=True)
class PackedTransport:
    """Rows as Arrow blobs, one or a few for each shard and input partition.

    Attributes
    ----------
    routes : list of int
        By shard.
    event_time : StructField or None
        The column that carries the watermark, whose newest value travels beside each blob.
    """

    routes: list[int]
    event_time: StructField | None

    def send(self, frame: DataFrame, hashed: Column) -> DataFrame:
        fields = [StructField(ROUTE, IntegerType()), StructField(BLOB, BinaryType())]
        if self.event_time is not None:
            fields.append(StructField(EVENT_TIME, self.event_time.dataType, metadata=self.event_time.metadata))
        routes, names = self.routes, [*frame.columns, HASH]
        event_time = self.event_time.name if self.event_time else None

        def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            freeze_modules()
            named = (batch.rename_columns(names) for batch in read_promptly(batches))
            return pack_rows(named, routes, event_time)

        # PySpark looks columns up by their bare names, and takes a dot or a backtick in one for syntax.
        columns = [*map(quoted, frame.columns), hashed]
        plain = frame.select(*[column.alias(f"c{i}") for i, column in enumerate(columns)])
        return plain.mapInArrow(pack, StructType(fields))

    def receive(self, chunks: Iterable[pd.DataFrame]) -> pa.Table:
        return pa.concat_tables([read_blob(blob) for chunk in chunks for blob in chunk[BLOB]])


def pack_rows(batches: Iterable[pa.RecordBatch], routes: list[int], event_time: str | None) -> Iterator[pa.RecordBatch]:
    """Split batches by shard and yield them as rows of (route, blob[, newest event time])."""
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
            yield _blobs(waiting, routes, event_time)
            waiting, waiting_bytes = [[] for _ in routes], 0
    if any(waiting):
        yield _blobs(waiting, routes, event_time)


def _blobs(waiting: list[list[pa.RecordBatch]], routes: list[int], event_time: str | None) -> pa.RecordBatch:
    full = [shard for shard, batches in enumerate(waiting) if batches]
    blobs = [write_blob(waiting[shard][0].schema, waiting[shard]) for shard in full]
    columns: dict[str, Any] = {
        ROUTE: pa.array([routes[shard] for shard in full], pa.int32()),
        BLOB: pa.array(blobs, pa.binary()),
    }
    if event_time is not None:
        newest = [_newest([b.column(event_time) for b in waiting[shard]]) for shard in full]
        columns[EVENT_TIME] = pa.concat_arrays(newest)
    return pa.RecordBatch.from_pydict(columns)


def _newest(columns: list[pa.Array]) -> pa.Array:
    """Return the newest event time as an array of one; of windows the one that ends last."""
    column = pa.concat_arrays(columns)
    times = pc.struct_field(column, "end") if pa.types.is_struct(column.type) else column
    place = pc.index(times, pc.max(times)).as_py()
    return column.slice(max(place, 0), 1)


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


def pack_output(batch: pa.RecordBatch) -> Iterator[pd.DataFrame]:
    """Yield an operator's output as the frames that ``applyInPandasWithState`` expects.

    Spark pads the state to the number of output rows and converts value by value, so output costs by the
    row: a few large blobs avoid that.
    """
    rows_each = max(1, int(batch.num_rows * BLOB_BYTES / max(batch.nbytes, 1)))
    for start in range(0, batch.num_rows, rows_each):
        yield pd.DataFrame({BLOB: [write_blob(batch.schema, [batch.slice(start, rows_each)])]})


def unpack_output(batches: Iterable[pa.RecordBatch], rows_each: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of packed output, at most `rows_each` in a batch."""
    for batch in batches:
        for blob in batch.column(0):
            yield from ipc.open_stream(blob.as_buffer()).read_all().to_batches(max_chunksize=rows_each)
