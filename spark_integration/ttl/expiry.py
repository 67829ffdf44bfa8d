"""State tables with a time to live: each key's row stays until it is deleted or expires.

The column `EXPIRES` has the time at which a row expires. A second table, the index, has the keys in order of that time,
like timers (`holdfast.spark_integration.timers`), so that eviction reads only expired rows::

    state                                    state.expiring
    user   n   expires_ms                    hash                     user   key_hash
    "ann"  3   1 700 003 600 412             1 700 003 656 250 + 2⁶³  "ann"  …     ← at most a step later
    "bob"  1   1 700 007 199 807             1 700 003 600 000 + 2⁶³  "bob"  …     ← since refreshed

A rewritten row keeps its index entry until the entry is due, and then gets an entry for its new time. So a row that is
refreshed in every micro-batch has one entry, which moves once per time to live. A row that is written without a read
always gets an entry; to limit their number, times are rounded up to a step, about `1 / STEPS` of the time to live.

Invariant: every row has an index entry no later than its rounded-up time, and later than all evicted times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import BoolArray, IntArray, take
from holdfast.backends.base import Found
from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.spark_integration.timers import Timers, is_by_time, timers_schema

if TYPE_CHECKING:
    from holdfast.spark_integration.shard.operator import BatchTimes

#: The value column with the time at which a row expires, in ms since 1970.
EXPIRES = "expires_ms"
#: 10,000 years.
LONGEST_TTL_MS = 10_000 * 366 * 86_400_000
STEPS = 64
#: `EXPIRES` of a row that was written without a time to live; later than all indexed times.
NEVER = np.iinfo(np.int64).max


class KeyRows:
    """The rows of given keys in a table without expiry; reads see earlier writes. Not thread-safe."""

    def __init__(self, transaction: Transaction, table: str, keys: Keys) -> None:
        self._transaction = transaction
        self._table = table
        self._keys = keys
        self._found: Found | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def get(self) -> Found:
        if self._found is None:
            self._found = self._transaction.get(self._table, self._keys)
        return self._found

    def put(self, values: pa.Table | pa.RecordBatch, rows: IntArray | None = None) -> None:
        """Set the rows of all keys, or of the keys at `rows`, to `values`."""
        self._transaction.put(self._table, self._at(rows), values)
        self._found = None

    def delete(self, rows: IntArray | None = None) -> None:
        self._transaction.delete(self._table, self._at(rows))
        self._found = None

    def _at(self, rows: IntArray | None) -> Keys:
        return self._keys if rows is None else self._keys.take(rows)


@dataclass(frozen=True)
class KeyTimes:
    """Event times of each key's rows in a micro-batch, in ms since 1970; the watermark for a key without rows."""

    #: The earliest and the latest time
    first_ms: IntArray
    last_ms: IntArray


class Expiry:
    """The expiry of a table's rows, in processing or event time; times are in ms since 1970.

    A row expires `ttl_ms` after its last write, once ``expires_ms <= now_ms``, as in Spark; in event time, `now_ms` is
    the watermark. If `ttl_ms` is None, only rows of earlier runs expire. Rows that had expired by `evicted_until_ms`,
    if known, were removed.
    """

    def __init__(self, table: str, ttl_ms: int | None, now_ms: int, evicted_until_ms: int | None) -> None:
        self.table = table
        self.index = index_of(table)
        self.now_ms = now_ms
        self._ttl_ms = ttl_ms
        self._step_ms = 1 << max(0, ((ttl_ms or 0) // STEPS).bit_length() - 1)
        self._first_ms = 0 if evicted_until_ms is None else evicted_until_ms + 1

    def expires_ms(self, written_ms: IntArray) -> IntArray:
        """Return when rows written at these times expire."""
        return np.full(len(written_ms), NEVER) if self._ttl_ms is None else written_ms + self._ttl_ms

    def place(self, transaction: Transaction, keys: Keys, expires_ms: IntArray) -> None:
        """Add index entries for keys, at most a step after their rows expire."""
        if len(keys):
            placed_ms = -(-expires_ms // self._step_ms) * self._step_ms
            Timers(transaction, self.index).add(keys, placed_ms)
            self._first_ms = min(self._first_ms, int(placed_ms.min()))  # in event time, a row may expire immediately

    def evict(self, transaction: Transaction) -> None:
        with transaction.deleting() as delete:
            for due in Timers(transaction, self.index).taken(self._first_ms, self.now_ms + 1):
                found = transaction.get(self.table, due.keys)  # with the values, which may be large
                expires_ms = expires_of(found.values)
                has_expired = expires_ms <= self.now_ms
                live = np.flatnonzero(found.exists & ~has_expired & (expires_ms != NEVER))
                self.place(transaction, due.keys.take(live), expires_ms[live])
                delete(self.table, due.keys.take(np.flatnonzero(found.exists & has_expired)))

    def earliest(self, transaction: Transaction) -> int | None:
        """Return when the next rows can be evicted, after `evict`; None if no row expires."""
        return Timers(transaction, self.index).earliest(self.now_ms + 1)


class ExpiringKeyRows(KeyRows):
    """The rows of given keys in a table with expiry; `times` are their event times, if event time is the clock.

    The index entry of a deleted row stays until it is due.
    """

    def __init__(self, transaction: Transaction, expiry: Expiry, keys: Keys, times: KeyTimes | None = None) -> None:
        super().__init__(transaction, expiry.table, keys)
        self._expiry = expiry
        now_ms = np.full(len(keys), expiry.now_ms)
        self._now_ms = now_ms if times is None else np.maximum(now_ms, times.first_ms)
        self._expires_ms = expiry.expires_ms(now_ms if times is None else times.last_ms)
        # If the key's row expires at this time or later, it is known to have an index entry.
        self._indexed_from: IntArray = np.full(len(keys), NEVER)

    def get(self) -> Found:
        """Return the rows; expired rows are absent."""
        found = super().get()
        expires_ms = expires_of(found.values)
        self._indexed_from = np.where(found.exists, np.minimum(self._indexed_from, expires_ms), self._indexed_from)
        return _without_expired(found, found.exists & (expires_ms > self._now_ms))

    def put(self, values: pa.Table | pa.RecordBatch, rows: IntArray | None = None) -> None:
        """Set the rows of all keys, or of the keys at `rows`, and restart their time to live."""
        expires_ms = self._expires_ms if rows is None else self._expires_ms[rows]
        super().put(values.append_column(EXPIRES, pa.array(expires_ms, mask=expires_ms == NEVER)), rows)
        rows = np.arange(len(self._keys)) if rows is None else rows
        is_new = self._indexed_from[rows] > expires_ms
        new = rows[is_new]
        self._expiry.place(self._transaction, self._keys.take(new), expires_ms[is_new])
        self._indexed_from[new] = expires_ms[is_new]


def expiry_of(transaction: Transaction, table: str, ttl_ms: int | None, times: BatchTimes) -> Expiry | None:
    """Return the expiry of a table's rows; None if they never expire. Call it once per transaction."""
    if ttl_ms is None:
        index = transaction.tables.get(index_of(table))
        # A processor's variable may have the name of an index.
        if index is None or not is_by_time(index) or not transaction.reveal(table, EXPIRES):
            return None
    # Without a time to live, the index only shrinks and is scanned from the start.
    return Expiry(table, ttl_ms, times.processing_ms, None if ttl_ms is None else times.previous_ms)


def open_rows(
    transaction: Transaction, table: str, expiry: Expiry | None, keys: Keys, times: KeyTimes | None = None
) -> KeyRows:
    return KeyRows(transaction, table, keys) if expiry is None else ExpiringKeyRows(transaction, expiry, keys, times)


def index_of(table: str) -> str:
    """Return the name of the index of `table`, which has its keys in order of expiry."""
    return f"{table}.expiring"


def expiring_tables(table: str, key_types: pa.Schema, value_types: pa.Schema) -> Mapping[str, TableSchema]:
    """Return the schemas of a table with expiry and of its index."""
    with_time = value_types.append(pa.field(EXPIRES, pa.int64()))
    return {
        table: TableSchema.of(table, key_types, with_time),
        index_of(table): timers_schema(index_of(table), key_types),
    }


def expires_of(values: pa.RecordBatch) -> IntArray:
    """Return when rows expire, given their values; `EXPIRES` is the last column."""
    expires_ms: IntArray = values.column(values.num_columns - 1).fill_null(NEVER).to_numpy()
    return expires_ms


def _without_expired(found: Found, live: BoolArray) -> Found:
    values = found.values.select(found.values.schema.names[:-1])
    if (live != found.exists).any():
        values = take(values, pa.array(np.arange(len(live)), mask=~live))
    return Found(live, values)
