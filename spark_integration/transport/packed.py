"""The `packed` transport: rows travel as blobs of Arrow data, one or a few per shard and input partition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from holdfast.backends.arrow.rows import IntArray
from holdfast.spark_integration.transport.blobs import BLOB, BLOB_BYTES, PADDED_ROWS_MAX, read_blob, write_blob
from holdfast.spark_integration.transport.python_stage import prepared
from holdfast.spark_integration.transport.routes import ROUTE, routes_of, shards_of
from holdfast.spark_integration.transport.transport import EVENT_TIME, HASH, EventTime, moments_of, quoted

#: Rows that wait to be sent take no more than this, whatever the number of shards: all may be of one, whose blob then
#: has that size, and Arrow holds less than 2 GiB in a column of blobs.
WAITING_BYTES = 256 << 20
#: Spark hands a task's rows to its worker in batches of so many rows, whatever their size, and fails where those of one
#: have more than 1 GiB. So there are rows without a blob, as many as make a batch of so many bytes full.
BATCH_BYTES = 512 << 20


@dataclass(frozen=True)
class PackedTransport:
    """Rows as Arrow blobs.

    Attributes
    ----------
    shards : int
    arrow_schema : pyarrow.Schema
        Of the table to receive.
    event_time : EventTime or None
        Its newest value travels beside each blob. If Spark filters rows by it, each blob holds rows of one event time.
    rows_each : int or None
        Maximum rows of a batch in which Spark hands over what arrives; None if its bytes are not to be bounded.
    """

    shards: int
    arrow_schema: pa.Schema
    event_time: EventTime | None
    rows_each: int | None = None

    def send(self, frame: DataFrame, hashed: Column) -> DataFrame:
        fields = [StructField(ROUTE, IntegerType()), StructField(BLOB, BinaryType())]
        routes, names, rows_each = routes_of(self.shards), [*frame.columns, HASH], self.rows_each
        event_time, filters_rows = None, False
        if self.event_time is not None:
            fields.append(self.event_time.sent)
            event_time, filters_rows = self.event_time.column, self.event_time.filters_rows

        def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            named = (batch.rename_columns(names) for batch in prepared(batches))
            return pack_rows(named, routes, event_time, cut_by_time=filters_rows, rows_each=rows_each)

        # PySpark looks columns up by bare name, and parses dots and backticks in it as syntax.
        columns = [*map(quoted, frame.columns), hashed]
        plain = frame.select(*[column.alias(f"c{i}") for i, column in enumerate(columns)])
        sent = plain.mapInArrow(pack, StructType(fields))
        if self.event_time is None or not self.event_time.later_us:
            return sent
        at = self.event_time.sent
        later = (F.col(at.name) + self.event_time.later_us).alias(at.name, metadata=at.metadata)
        return sent.select(ROUTE, BLOB, later)

    def receive(self, chunks: Iterable[pd.DataFrame]) -> Iterator[pa.Table]:
        return (read_blob(blob) for chunk in chunks for blob in chunk[BLOB] if blob is not None)


def pack_rows(
    batches: Iterable[pa.RecordBatch],
    routes: list[int],
    event_time: str | None,
    *,
    cut_by_time: bool = False,
    rows_each: int | None = None,
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
        Whether each blob must hold rows of one event time only.
    rows_each : int, optional
        As of `PackedTransport`.
    """
    padding_each = 0.0 if rows_each is None or rows_each >= PADDED_ROWS_MAX else rows_each / BATCH_BYTES
    waiting: list[list[pa.RecordBatch]] = [[] for _ in routes]
    waiting_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        shards = shards_of(batch.column(HASH).to_numpy().view(np.uint64), len(routes))
        # A stable sort of 16-bit numbers is a radix sort; there are no more shards than these: `MOST_SHARDS`.
        order = np.argsort(shards.astype(np.uint16), kind="stable")
        sorted_batch = batch.take(pa.array(order))
        bounds = np.searchsorted(shards[order], np.arange(len(routes) + 1))
        for shard in np.flatnonzero(bounds[1:] > bounds[:-1]):
            start, end = int(bounds[shard]), int(bounds[shard + 1])
            waiting[shard].append(sorted_batch.slice(start, end - start))
        waiting_bytes += batch.nbytes
        if waiting_bytes >= min(BLOB_BYTES * len(routes), WAITING_BYTES):
            yield _blobs(waiting, routes, event_time, cut_by_time, padding_each)
            waiting, waiting_bytes = [[] for _ in routes], 0
    if any(waiting):
        yield _blobs(waiting, routes, event_time, cut_by_time, padding_each)


def _blobs(
    waiting: list[list[pa.RecordBatch]],
    routes: list[int],
    event_time: str | None,
    cut_by_time: bool,
    padding_each: float,
) -> pa.RecordBatch:
    """Return blobs as rows, each followed by `padding_each` empty rows per byte."""
    blobs = [(route, batches) for route, batches in zip(routes, waiting, strict=True) if batches]
    if cut_by_time and event_time is not None:
        blobs = [(route, [cut]) for route, batches in blobs for cut in _cut_by_time(batches, event_time)]
    written = [write_blob(batches[0].schema, batches) for _, batches in blobs]
    rows = np.array([1 + int(len(data) * padding_each) for data in written])
    columns: dict[str, Any] = {
        ROUTE: pa.array(np.repeat([route for route, _ in blobs], rows), pa.int32()),
        BLOB: pa.array(_padded(written, rows), pa.binary()),
    }
    if event_time is not None:
        # Spark drops no row without an event time.
        newest = [_newest([b.column(event_time) for b in batches]) for _, batches in blobs]
        columns[EVENT_TIME] = pa.array(_padded(newest, rows), pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def _padded(values: list[Any], rows: IntArray) -> list[Any]:
    """Return so many rows for each value: the value, and null."""
    padded: list[Any] = [None] * int(rows.sum())
    for place, value in zip((np.cumsum(rows) - rows).tolist(), values, strict=True):
        padded[place] = value
    return padded


def _cut_by_time(batches: list[pa.RecordBatch], event_time: str) -> Iterator[pa.RecordBatch]:
    """Yield one batch per event time."""
    together = pa.concat_batches(batches)
    moments = moments_of(together.column(event_time)).dictionary_encode(null_encoding="encode").indices.to_numpy()
    order = np.argsort(moments, kind="stable")
    starts = np.flatnonzero(np.diff(moments[order], prepend=-1))
    in_order = together.take(pa.array(order))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        yield in_order.slice(start, end - start)


def _newest(columns: list[pa.Array]) -> int | None:
    """Return the newest event time, in microseconds since 1970."""
    newest: int | None = pc.max(moments_of(pa.concat_arrays(columns)).view(pa.int64())).as_py()
    return newest
