"""Carries rows to their shards in blobs: Arrow data in one value of a Spark row, a few per shard and input partition.

Spark passes a stateful operator's rows one by one, but a shard needs columns. A Python stage before the shuffle splits
each Arrow batch by shard, without work per row. There, a `Combiner` reduces rows whose keys repeat. For output, see
`holdfast.spark_integration.transport.output`.

Spark identifies late rows through *marks*: small rows between the blobs, with the event times of the blobs' rows. It
drops late marks between sending and receiving::

    sent   route  blob   event time                 watermark 1,000 ms
           7      ▒▒▒▒   `NEVER_LATE`               stays
           7      null   1,000,000 µs               dropped: the blob's rows up to 1,000 ms are late
           7      null   1,001,000 µs               stays: the earliest remaining mark
           7      null   1,004,000 µs               stays

A watermark is a whole number of milliseconds, and a row at the watermark is late. So the rows of one millisecond, such
as (0, 1,000] µs, are all late or all on time, and one mark per millisecond suffices. Spark decides whether to compare
with this or the previous micro-batch's watermark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from holdfast.spark_integration.spark_types import Watermark
from holdfast.spark_integration.transport.python_stage import prepared
from holdfast.spark_integration.transport.routes import ROUTE, routes_of, shards_of

HASH = "__holdfast_hash"
EVENT_TIME = "__holdfast_event_time"
#: Concatenates tables of rows, in memory or in a file.
Gather = Callable[[Iterable[pa.Table]], pa.Table]
#: The column that holds blobs.
BLOB = "__holdfast_blob"
#: Approximate maximum size of a blob.
BLOB_BYTES = 32 << 20
#: Beyond this, padding with null rows, some 60 bytes each in Spark's worker, takes more memory than it saves.
PADDED_ROWS_MAX = 1 << 19
_Longs = npt.NDArray[np.int64]
#: The event time of blobs, in microseconds since 1970; with null instead, pandas would round the marks.
NEVER_LATE = int(np.iinfo(np.int64).max)
NO_MARKS = np.empty(0, np.int64)
#: Limit on the rows that wait to be sent, whatever the number of shards: if all belong to one shard, its blob has this
#: size, and a column of blobs in Arrow must stay below 2 GiB.
WAITING_BYTES = 256 << 20
#: Spark passes a task's rows to its worker in batches of a fixed number of rows, and fails if a batch exceeds 1 GiB. So
#: enough empty rows follow each blob that a full batch has about this size.
BATCH_BYTES = 512 << 20
#: Fewer rows for a shard are not worth combining.
_COMBINED_ROWS_MIN = 1024
#: With more rows, the number of keys is estimated from a sixteenth of the keys.
_JUDGED_WHOLE_MAX, _SAMPLED = 1 << 14, 16


class Combiner(Protocol):
    """Reduces the rows of a key before the shuffle; sent to the workers."""

    def received(self, sent: pa.Schema) -> pa.Schema:
        """Return the schema of the rows that a shard receives, given the schema of the input rows."""

    def spread(self, batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        """Return a row for each key of each input row, with the key's hash."""

    def partial(self, rows: pa.Table) -> pa.Table:
        """Convert each input row to the form that the shard receives."""

    def combined(self, rows: pa.Table) -> pa.Table:
        """Return one row per key, in the form that the shard receives."""


def quoted(name: str) -> Column:
    """Return a column by its bare name, whatever its characters."""
    return F.col("`" + name.replace("`", "``") + "`")


class Received(NamedTuple):
    """The rows of a shard in a micro-batch, and the number of further rows that were dropped as late."""

    rows: pa.Table
    late: int


@dataclass(frozen=True)
class EventTime:
    """The column that carries the watermark.

    `filters_rows`: whether Spark drops late rows before they reach their shard, as for ``EventTimeTimeout``.
    """

    column: str
    watermark: Watermark
    filters_rows: bool

    @property
    def sent(self) -> StructField:
        """The column as sent: microseconds since 1970, shifted later by the hold-back, since Spark drops older rows."""
        return StructField(EVENT_TIME, LongType(), metadata=Watermark(self.watermark.delay_ms).metadata)


def moments_of(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return the time that Spark compares with the watermark: the column itself or, for windows, their ends."""
    return pc.struct_field(column, "end") if pa.types.is_struct(column.type) else column


def write_blob(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> bytes:
    """Serialise batches as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read_blob(blob: bytes | bytearray) -> pa.Table:
    """Read what `write_blob` wrote, without copying."""
    return ipc.open_stream(pa.py_buffer(blob)).read_all()


def marks_of(batches: list[pa.RecordBatch], event_time: EventTime) -> _Longs:
    """Return the event times of the marks for rows; a row without a time is never late and needs no mark."""
    columns = [moments_of(batch.column(event_time.column)).view(pa.int64()) for batch in batches]
    known = pa.concat_arrays(columns).drop_null().to_numpy()
    last_ms = pc.unique(pa.array(_last_ms(known))).to_numpy() + event_time.watermark.held_back_ms
    return np.where(last_ms > NEVER_LATE // 1000, NEVER_LATE, last_ms * 1000)


def _last_ms(times_us: _Longs) -> _Longs:
    """Return the last millisecond of each time: the earliest watermark that makes it late."""
    ms = times_us // 1000
    return ms + (ms * 1000 != times_us)


@dataclass(frozen=True)
class PackedTransport:
    """Rows as Arrow blobs, which Spark passes in batches of at most `rows_each` rows; None adds no empty rows.

    `arrow_schema` is the schema of the rows that a shard receives.
    """

    shards: int
    arrow_schema: pa.Schema
    event_time: EventTime | None
    rows_each: int | None = None
    combiner: Combiner | None = None

    def send(self, frame: DataFrame, hashed: Column, noted: Callable[[], AbstractContextManager[None]]) -> DataFrame:
        """Return the frame to group by `ROUTE`, whose last column is the `hashed` keys; runs on the driver.

        `noted` wraps the code that runs in a worker. The keys' expression comes last: Spark repeats an expression for
        each column renamed after it, which doubles the constraints of its optimiser.
        """
        sent = StructField(EVENT_TIME, LongType()) if self.event_time is None else self.event_time.sent
        schema = StructType([StructField(ROUTE, IntegerType()), StructField(BLOB, BinaryType()), sent])
        routes, names, rows_each = routes_of(self.shards), [*frame.columns, HASH], self.rows_each
        marked, combiner = self._marked, self.combiner

        def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            named = (batch.rename_columns(names) for batch in prepared(batches))
            with noted():
                yield from pack_rows(named, routes, marked, rows_each, combiner)

        # PySpark selects columns by bare name, and parses dots and backticks in a name as syntax.
        columns = [*map(quoted, frame.columns), hashed]
        plain = frame.select(*[column.alias(f"c{i}") for i, column in enumerate(columns)])
        return plain.mapInArrow(pack, schema)

    @property
    def _marked(self) -> EventTime | None:
        """The event time that decides which rows are late."""
        return self.event_time if self.event_time is not None and self.event_time.filters_rows else None

    def receive(self, chunks: Iterable[pd.DataFrame], gather: Gather) -> Received:
        """Return the rows of one shard and micro-batch; runs in a worker."""
        earliest_us = NEVER_LATE  # of the marks that Spark has not dropped

        def tables() -> Iterator[pa.Table]:
            nonlocal earliest_us
            for chunk in chunks:
                if len(chunk):
                    earliest_us = min(earliest_us, int(chunk[EVENT_TIME].min()))
                yield from (self._received(read_blob(blob)) for blob in chunk[BLOB] if blob is not None)

        rows, event_time = gather(tables()), self._marked
        if event_time is None:
            return Received(rows, 0)
        first_ms = _last_ms(np.array([earliest_us])) - event_time.watermark.held_back_ms
        late = [_last_ms(_times_us(batch, event_time)) < first_ms for batch in rows.to_batches()]
        count = sum(int(np.count_nonzero(is_late)) for is_late in late)
        if count:
            on_time = zip(rows.to_batches(), late, strict=True)
            rows = gather(pa.Table.from_batches([batch.filter(pa.array(~is_late))]) for batch, is_late in on_time)
        return Received(rows, count)

    def _received(self, rows: pa.Table) -> pa.Table:
        """Convert a blob's rows to the form that the shard receives."""
        if self.combiner is None or rows.schema.names == self.arrow_schema.names:
            return rows
        return self.combiner.partial(rows)


def _times_us(rows: pa.RecordBatch, event_time: EventTime) -> _Longs:
    times: _Longs = moments_of(rows.column(event_time.column)).view(pa.int64()).fill_null(NEVER_LATE).to_numpy()
    return times


def pack_rows(
    batches: Iterable[pa.RecordBatch],
    routes: list[int],
    marked: EventTime | None,
    rows_each: int | None = None,
    combiner: Combiner | None = None,
) -> Iterator[pa.RecordBatch]:
    """Split batches by shard; yield rows of route, blob and event time, with marks if `marked` is not None."""
    padding_each = 0.0 if rows_each is None or rows_each >= PADDED_ROWS_MAX else rows_each / BATCH_BYTES
    waiting: list[list[pa.RecordBatch]] = [[] for _ in routes]
    waiting_bytes = 0
    for batch in batches if combiner is None else combiner.spread(batches):
        if not batch.num_rows:
            continue
        shards = shards_of(batch.column(HASH).to_numpy().view(np.uint64), len(routes))
        # A stable sort of 16-bit numbers is a radix sort; `MOST_SHARDS` fits into 16 bits.
        order = np.argsort(shards.astype(np.uint16), kind="stable")
        sorted_batch = batch.take(pa.array(order))
        bounds = np.searchsorted(shards[order], np.arange(len(routes) + 1))
        for shard in np.flatnonzero(bounds[1:] > bounds[:-1]):
            start, end = int(bounds[shard]), int(bounds[shard + 1])
            waiting[shard].append(sorted_batch.slice(start, end - start))
        waiting_bytes += batch.nbytes
        if waiting_bytes >= min(BLOB_BYTES * len(routes), WAITING_BYTES):
            yield _packed(_combined(waiting, combiner), routes, marked, padding_each)
            waiting, waiting_bytes = [[] for _ in routes], 0
    if any(waiting):
        yield _packed(_combined(waiting, combiner), routes, marked, padding_each)


def _combined(waiting: list[list[pa.RecordBatch]], combiner: Combiner | None) -> list[list[pa.RecordBatch]]:
    """Combine the rows of each shard whose keys repeat."""
    if combiner is None:
        return waiting
    return [_smaller(batches, combiner) if keys_repeat(batches) else batches for batches in waiting]


def _smaller(batches: list[pa.RecordBatch], combiner: Combiner) -> list[pa.RecordBatch]:
    """Combine rows unless that takes more bytes: many aggregates may keep the same long text."""
    rows = pa.Table.from_batches(batches)
    combined = combiner.combined(rows.combine_chunks())
    return combined.to_batches() if combined.nbytes <= rows.nbytes else batches


def keys_repeat(batches: list[pa.RecordBatch]) -> bool:
    """Return whether there are at least twice as many rows as keys."""
    if sum(map(len, batches)) < _COMBINED_ROWS_MIN:
        return False
    hashes = np.concatenate([batch.column(HASH).to_numpy() for batch in batches])
    rows, each = len(hashes), 1
    if rows > _JUDGED_WHOLE_MAX:
        hashes, each = hashes[hashes % _SAMPLED == 0], _SAMPLED
    keys: int = each * pc.count_distinct(pa.array(hashes)).as_py()
    return 2 * keys <= rows


def _packed(
    waiting: list[list[pa.RecordBatch]], routes: list[int], marked: EventTime | None, padding_each: float
) -> pa.RecordBatch:
    """Return a blob for each shard, each followed by `padding_each` empty rows per byte, and then all marks."""
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
