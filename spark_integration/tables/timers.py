"""Timers of keys, in the order in which they are due.

A table's rows are sorted by a 64-bit hash; this table has the due time in the hash's place::

    hash                 key.user   value.key_hash
    due_ms + 2**63       …          hash of the key
    0x800001…68          "cem"      0x8c…            ← due first
    0x800001…90          "ann"      0x01…
    0x800001…90          "bob"      0x1f…            ← due at the same time: by key

So the timers that are due form one range at the beginning, and firing costs by what is due, not by what is registered.
A key may have any number of timers at different times. Timers that fire are deleted, and a backend may have to step
over deleted rows: a caller that knows a time before which there is no timer passes it and skips them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.backends.arrow.rows import HashArray, IntArray
from holdfast.backends.base import MAX_HASH
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.mvcc import Transaction
from holdfast.spark_integration.tables.keys_at_once import KeysAtOnce

_ZERO = np.uint64(1 << 63)
_KEY_HASH = "key_hash"
# In which the earliest timer is looked for; seven ranges reach the end of time.
_FIRST_RANGE_MS, _RANGE_GROWTH = 1_000, 256

_VALUES = pa.schema([(_KEY_HASH, pa.uint64())])


def timers_schema(table: str, key_types: pa.Schema) -> TableSchema:
    """Return the schema of a timer table for keys of these types."""
    return TableSchema.of(table, key_types, _VALUES)


def first_due_ms(run: Run) -> int:
    """Return when the first of at least one timer is due."""
    return int(_to_ms(run.hashes[:1])[0])


def is_by_time(schema: TableSchema) -> bool:
    """Tell whether a table holds timers, by a type that no user's column has."""
    return bool(schema.value.equals(_VALUES))


def hashes_of_keys(run: Run) -> HashArray:
    """Return the hashes of the timers' keys; the timers themselves are placed by time."""
    hashes: HashArray = run.values.column(0).to_numpy()
    return hashes


def timers_run(schema: TableSchema, keys: Keys, due_ms: IntArray) -> Run:
    """Return a table of timers with these keys and times, each once."""
    return Run.build(schema, Keys(_to_hash(due_ms), keys.columns), _values_of(keys))


def _values_of(keys: Keys) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(keys.hashes, pa.uint64())], schema=_VALUES)


@dataclass(frozen=True)
class DueTimers:
    """Some timers."""

    keys: Keys  #: With the hashes of the keys themselves, for look-ups
    due_ms: IntArray  #: Ascending

    def __len__(self) -> int:
        return len(self.due_ms)

    def pieces(self, at_once: KeysAtOnce) -> Iterator[DueTimers]:
        """Yield the timers in order, in pieces of the current `at_once`."""
        start = 0
        while start < len(self):
            end = min(start + at_once.count, len(self))
            yield DueTimers(self.keys.take(np.arange(start, end)), self.due_ms[start:end])
            start = end


class Timers:
    """The timers of one table in one transaction; times are in ms since 1970.

    Threads: one at a time, like the transaction.
    """

    def __init__(self, transaction: Transaction, table: str) -> None:
        self._transaction = transaction
        self._table = table

    def add(self, keys: Keys, due_ms: IntArray) -> None:
        """Add a timer for each key, beside those it has."""
        if len(keys):
            self._transaction.put(self._table, Keys(_to_hash(due_ms), keys.columns), _values_of(keys))

    def remove(self, keys: Keys, due_ms: IntArray) -> None:
        """Remove each key's timer at its time, if there is one."""
        if len(keys):
            self._transaction.delete(self._table, Keys(_to_hash(due_ms), keys.columns))

    def due(self, first_ms: int, before_ms: int, timers_each: int) -> Iterator[DueTimers]:
        """Yield the timers due in [first_ms, before_ms), earliest first, at most `timers_each` at once.

        Timers added or removed during the iteration do not change what it yields.
        """
        if first_ms < before_ms:
            for run in self._transaction.scan(self._table, _bound(first_ms), _bound(before_ms - 1)):
                for chunk in run.chunks(timers_each, run.size_bytes + 1):
                    yield _timers(chunk)

    def earliest(self, first_ms: int) -> int | None:
        """Return when the earliest timer at or after `first_ms` is due; None if there is none.

        Cost: by what is due soon and what this transaction has written there. A scan sorts all of the writes in its
        range, so the ranges begin short.
        """
        start, width = _bound(first_ms), _FIRST_RANGE_MS
        while start <= MAX_HASH:
            end = min(start + width, MAX_HASH)
            for run in self._transaction.scan(self._table, start, end):
                if len(run):
                    return first_due_ms(run)
            start, width = end + 1, width * _RANGE_GROWTH
        return None


def _timers(run: Run) -> DueTimers:
    return DueTimers(Keys(hashes_of_keys(run), run.keys), _to_ms(run.hashes))


def _bound(time_ms: int) -> int:
    return int(_to_hash(np.array([time_ms], np.int64))[0])


def _to_hash(due_ms: npt.NDArray[np.int64]) -> HashArray:
    """Return times as unsigned integers in the same order."""
    return np.ascontiguousarray(due_ms).view(np.uint64) ^ _ZERO


def _to_ms(hashes: HashArray) -> IntArray:
    return (hashes ^ _ZERO).view(np.int64)
