"""Rows travel to their shard as blobs of Arrow data, one or a few per shard and input partition.

Python splits each Arrow batch by shard: one more Python stage, and no work per row.

Until November 2026 flat columns could travel as rows instead, with a route that Spark computed. Spark pins the route,
the key of its state, but not how rows come: a query that began so goes on with blobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from holdfast.spark_integration.transport.blobs import BLOB, BLOB_BYTES, PADDED_ROWS_MAX, read_blob, write_blob
from holdfast.spark_integration.transport.late_rows import NEVER_LATE, NO_MARKS, Marks, marks_of
from holdfast.spark_integration.transport.python_stage import prepared
from holdfast.spark_integration.transport.routes import ROUTE, routes_of, shards_of
from holdfast.spark_integration.transport.transport import EVENT_TIME, HASH, EventTime, Gather, Received, quoted

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
    rows_each : int or None
        Maximum rows of a batch in which Spark hands over what arrives; None if its bytes are not to be bounded.
    """

    shards: int
    arrow_schema: pa.Schema
    event_time: EventTime | None
    rows_each: int | None = None

    def send(self, frame: DataFrame, hashed: Column) -> DataFrame:
        """Return the frame to group by `ROUTE`; runs on the driver.

        Parameters
        ----------
        frame : DataFrame
            The columns to carry.
        hashed : Column
            The hash of the keys, over columns of `frame`; carried as the last column, `HASH`.

        Notes
        -----
        Expressions over the keys must come last. Spark infers constraints from aliases: it repeats an expression for
        each of its columns that is renamed after it, which doubles the number of constraints with each key.
        """
        sent = StructField(EVENT_TIME, LongType()) if self.event_time is None else self.event_time.sent
        schema = StructType([StructField(ROUTE, IntegerType()), StructField(BLOB, BinaryType()), sent])
        routes, names, rows_each = routes_of(self.shards), [*frame.columns, HASH], self.rows_each
        marked = self._marked

        def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return pack_rows((b.rename_columns(names) for b in prepared(batches)), routes, marked, rows_each)

        # PySpark looks columns up by bare name, and parses dots and backticks in it as syntax.
        columns = [*map(quoted, frame.columns), hashed]
        plain = frame.select(*[column.alias(f"c{i}") for i, column in enumerate(columns)])
        return plain.mapInArrow(pack, schema)

    @property
    def _marked(self) -> EventTime | None:
        """The event time by which late rows are dropped."""
        return self.event_time if self.event_time is not None and self.event_time.filters_rows else None

    def receive(self, chunks: Iterable[pd.DataFrame], gather: Gather) -> Received:
        """Return the rows of one shard and micro-batch; runs in a worker."""
        marks = Marks()
        rows = gather(read_blob(blob) for chunk in map(marks.noted, chunks) for blob in chunk[BLOB] if blob is not None)
        return Received(rows, 0) if self._marked is None else marks.drop_late(rows, self._marked, gather)


def pack_rows(
    batches: Iterable[pa.RecordBatch], routes: list[int], marked: EventTime | None, rows_each: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Split batches by shard and yield them as rows of (route, blob, event time).

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
    routes : list of int
        By shard.
    marked : EventTime or None
        By which late rows are dropped: blobs come with its marks.
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
            yield _packed(waiting, routes, marked, padding_each)
            waiting, waiting_bytes = [[] for _ in routes], 0
    if any(waiting):
        yield _packed(waiting, routes, marked, padding_each)


def _packed(
    waiting: list[list[pa.RecordBatch]], routes: list[int], marked: EventTime | None, padding_each: float
) -> pa.RecordBatch:
    """Return a blob for each shard, followed by `padding_each` empty rows per byte; and then all marks."""
    held = [(route, batches) for route, batches in zip(routes, waiting, strict=True) if batches]
    blobs = [write_blob(batches[0].schema, batches) for _, batches in held]
    rows = np.array([1 + int(len(data) * padding_each) for data in blobs])
    marks = [NO_MARKS if marked is None else marks_of(batches, marked) for _, batches in held]
    numbers = [route for route, _ in held]
    placed: list[Any] = [None] * int(rows.sum() + sum(map(len, marks)))
    for place, data in zip((np.cumsum(rows) - rows).tolist(), blobs, strict=True):
        placed[place] = data
    columns = {
        ROUTE: pa.array(np.concatenate([np.repeat(numbers, rows), np.repeat(numbers, [*map(len, marks)])]), pa.int32()),
        BLOB: pa.array(placed, pa.binary()),
        EVENT_TIME: pa.array(np.concatenate([np.full(rows.sum(), NEVER_LATE), *marks])),
    }
    return pa.RecordBatch.from_pydict(columns)
