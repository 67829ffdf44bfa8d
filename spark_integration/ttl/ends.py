"""Indexes rows of state by their end in event time, so that a range scan finds ended rows.

::

    state                              timers_by_due
    user   window_start   n            hash            user   window_start
    "ann"  09:00          3            09:59:59.999    "ann"  09:00        ← ended once the watermark is later
    "bob"  10:00          1            10:59:59.999    "bob"  10:00

A new row gets one index entry. A row whose end moves, such as a session, keeps its entry until the entry is due, and
then gets an entry for its new end. Entries of removed rows are skipped.

The index is a table of timers (`holdfast.spark_integration.timers`), which savepoints, rescaling and look-ups support.
A row has ended once ``end <= watermark``; a timer is due once the watermark is later. So a timer is set a millisecond
before the end.

A time to live (`Ttl`) uses event time or, without a watermark, processing time. In processing time, expired rows are
removed at the shard's next call with rows, before the look-ups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import BoolArray, IntArray, one_chunk
from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.spark_integration.shard.operator import STATE_TABLE, BatchTimes, CallCounts, ShardInput
from holdfast.spark_integration.timers import TIMERS_BY_DUE, Timers, timers_schema
from holdfast.spark_integration.transport.packed import moments_of

#: The value column with the end of a row's time to live; null if the row never expires.
UNTIL = pa.field("until", pa.timestamp("us", "UTC"))
#: `UNTIL` of a row that never expires, as a number.
NEVER = np.iinfo(np.int64).max


class Ends:
    """The index of ends during one call of a shard."""

    def __init__(self, transaction: Transaction, times: BatchTimes) -> None:
        self._index = Timers(transaction, TIMERS_BY_DUE)
        self._earliest_ms = times.earliest_timer_ms
        self._now_ms = times.watermark_ms

    @classmethod
    def by_calls(cls, transaction: Transaction, times: BatchTimes) -> Ends:
        """Return an index of ends in processing time; the next call with rows removes ended rows."""
        found = cls(transaction, times)
        found._earliest_ms = 0 if times.previous_ms is None else times.previous_ms
        found._now_ms = times.processing_ms
        return found

    @staticmethod
    def tables(key_types: pa.Schema) -> Mapping[str, TableSchema]:
        return {TIMERS_BY_DUE: timers_schema(TIMERS_BY_DUE, key_types)}

    def add(self, keys: Keys, end_us: IntArray) -> None:
        """Add entries for rows that end at these times, in microseconds since 1970."""
        if len(keys):
            due_ms = due_of(end_us)
            self._index.add(keys, due_ms)
            first_ms = int(due_ms.min())
            self._earliest_ms = first_ms if self._earliest_ms is None else min(self._earliest_ms, first_ms)

    def move(self, keys: Keys, end_us: IntArray, before_us: IntArray) -> None:
        """Add entries for rows whose end has become earlier; rows with a later end keep their entry."""
        rows = np.flatnonzero(end_us < before_us)
        self.add(keys.take(rows), end_us[rows])

    def go_on(self, keys: Keys, end_us: IntArray) -> BoolArray:
        """Return which rows have not ended, and add entries for their ends."""
        lives: BoolArray = due_of(end_us) >= (self._now_ms or 0)
        rows = np.flatnonzero(lives)
        self.add(keys.take(rows), end_us[rows])
        return lives

    def over(self, counts: CallCounts) -> Iterator[Keys]:
        """Remove the entries of ended rows and yield their keys, earliest first; see `Timers.taken`."""
        if self._earliest_ms is None or self._now_ms is None or self._now_ms <= self._earliest_ms:
            return
        first_ms, self._earliest_ms = self._earliest_ms, self._index.earliest(self._now_ms)
        for due in self._index.taken(first_ms, self._now_ms):
            counts.timers_due += len(due)
            yield due.keys

    def earliest_ms(self) -> int | None:
        """Return when the shard must be called next; None if only rows require a call."""
        return self._earliest_ms


def due_of(end_us: IntArray) -> IntArray:
    """Return the last full millisecond before `end_us`."""
    return -(-end_us // 1000) - 1


def microseconds(column: pa.Array | pa.ChunkedArray) -> IntArray:
    """Convert timestamps without nulls to microseconds."""
    numbers: IntArray = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_numpy()
    return numbers


def microseconds_or_0(column: pa.Array) -> IntArray:
    return microseconds(column.fill_null(pa.scalar(0, pa.int64()).cast(column.type)))


def timestamps(numbers: np.ndarray, t: pa.DataType) -> pa.Array:
    return pa.array(numbers).view(pa.timestamp("us", t.tz))


@dataclass(frozen=True)
class Ttl:
    """A time to live and its clock."""

    length_us: int
    event_time: str | None  #: The column with the time from which it counts; None for the micro-batch's time

    @property
    def clock(self) -> str:
        """The clock, which a restart must not change."""
        return "processing time" if self.event_time is None else "event time"

    def until(self, rows: pa.Table, times: BatchTimes) -> pa.Array:
        """Return the end of each row's time to live; a null time counts as 1970."""
        if self.event_time is None:
            return timestamps(np.full(rows.num_rows, times.processing_ms * 1000 + self.length_us), UNTIL.type)
        at = one_chunk(moments_of(rows.column(self.event_time))).cast(pa.int64())
        return pc.add(at.fill_null(0), self.length_us).view(UNTIL.type)

    def ends(self, transaction: Transaction, times: BatchTimes) -> Ends:
        return Ends.by_calls(transaction, times) if self.event_time is None else Ends(transaction, times)

    def next_call_ms(self, ends: Ends) -> int | None:
        """Return when the shard must be called even without rows; None if never."""
        return None if self.event_time is None else ends.earliest_ms()


def until_us(column: pa.Array | pa.ChunkedArray) -> IntArray:
    """Convert `UNTIL` to microseconds, and null to `NEVER`."""
    return microseconds(column.fill_null(pa.scalar(NEVER).cast(column.type)))


def with_until(value_types: pa.Schema, ttl: Ttl | None) -> pa.Schema:
    """Append `UNTIL` to value columns if there is a time to live."""
    return value_types if ttl is None else value_types.append(UNTIL)


def forget_rows(ends: Ends, batch: ShardInput, transaction: Transaction) -> None:
    """Remove expired keys from a table with one row per key; keep refreshed keys."""
    with transaction.deleting() as delete:
        for keys in ends.over(batch.counts):
            found = transaction.get(STATE_TABLE, keys)
            until = np.where(found.exists, until_us(found.values.column(UNTIL.name)), 0)
            delete(STATE_TABLE, keys.take(np.flatnonzero(~ends.go_on(keys, until))))
