"""Tables of timers, sorted by due time, with any number of timers per key (`Timers`) or at most one (`KeyTimers`).

A table's rows are sorted by a 64-bit hash; a table of timers has the due time in place of the hash::

    hash                 key.user   value.key_hash
    due_ms + 2**63       …          hash of the key
    0x800001…68          "cem"      0x8c…            ← due first
    0x800001…90          "ann"      0x01…
    0x800001…90          "bob"      0x1f…            ← due at the same time: by key

So firing reads only due timers. A backend may have to skip deleted timers, so a caller passes a time before which it
knows that no timer is due.

`KeyTimers` uses two tables: `timers` by key, to replace a key's timer, and `timers_by_due` by time. A key with a timer
need not have state. The time column of `timers` is named after the clock, so that an operator with the other clock is
rejected: its timers would be due in a different century.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.backends.arrow.rows import HashArray, IntArray
from holdfast.backends.base import MAX_HASH
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.mvcc import Transaction
from holdfast.spark_integration.shard.timeout import TIMERS_TABLE, TimeoutConf

if TYPE_CHECKING:
    from holdfast.spark_integration.shard.operator import BatchTimes

_ZERO = np.uint64(1 << 63)
_KEY_HASH = "key_hash"
# Ranges searched for the earliest timer; seven reach the end of time.
_FIRST_RANGE_MS, _RANGE_GROWTH = 1_000, 256

_VALUES = pa.schema([(_KEY_HASH, pa.uint64())])
TIMERS, TIMERS_BY_DUE = TIMERS_TABLE, "timers_by_due"
#: The column of `timers` with the due time, by timeout.
DUE: Mapping[TimeoutConf, str] = {"EventTimeTimeout": "due_ms", "ProcessingTimeTimeout": "due_processing_ms"}
#: Marks the absence of a timer in arrays of due times, which are not negative.
NO_TIMER = -1
_TAKEN_AT_ONCE = 65_536
AT_ONCE_BYTES = 32 << 20
#: The number of keys until their size is known, and its largest growth per step, since few rows may exist at first.
_FIRST, _GROWTH = 256, 8


def timers_schema(table: str, key_types: pa.Schema) -> TableSchema:
    return TableSchema.of(table, key_types, _VALUES)


def first_due_ms(run: Run) -> int:
    """Return the first timer's due time; the run is not empty."""
    return int(_to_ms(run.hashes[:1])[0])


def is_by_time(schema: TableSchema) -> bool:
    """Return whether a table holds timers; users' columns never have this type."""
    return bool(schema.value.equals(_VALUES))


def hashes_of_keys(run: Run) -> HashArray:
    """Return the hashes of the timers' keys; `run.hashes` are the due times."""
    hashes: HashArray = run.values.column(0).to_numpy()
    return hashes


def timers_run(schema: TableSchema, keys: Keys, due_ms: IntArray) -> Run:
    """Return a run of timers with these keys and times, without duplicates."""
    return Run.build(schema, Keys(_to_hash(due_ms), keys.columns), _values_of(keys))


def _values_of(keys: Keys) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(keys.hashes, pa.uint64())], schema=_VALUES)


@dataclass(frozen=True)
class DueTimers:
    """Due timers and their keys."""

    keys: Keys  #: With the keys' own hashes, for look-ups
    due_ms: IntArray  #: Ascending

    def __len__(self) -> int:
        return len(self.due_ms)

    def pieces(self, at_once: KeysAtOnce) -> Iterator[DueTimers]:
        """Yield the timers in order, each piece within the current limit of `at_once`."""
        start = 0
        while start < len(self):
            end = min(start + at_once.count, len(self))
            yield DueTimers(self.keys.slice(start, end), self.due_ms[start:end])
            start = end


class Timers:
    """The timers of a table in a transaction, in ms since 1970; not thread-safe."""

    def __init__(self, transaction: Transaction, table: str) -> None:
        self._transaction = transaction
        self._table = table

    def add(self, keys: Keys, due_ms: IntArray) -> None:
        """Add a timer for each key, without effect on its other timers."""
        if len(keys):
            self._transaction.put(self._table, Keys(_to_hash(due_ms), keys.columns), _values_of(keys))

    def remove(self, keys: Keys, due_ms: IntArray) -> None:
        """Remove each key's timer at that time, if it exists."""
        if len(keys):
            self._transaction.delete(self._table, Keys(_to_hash(due_ms), keys.columns))

    def due(self, first_ms: int, before_ms: int, timers_each: int) -> Iterator[DueTimers]:
        """Yield timers due in [first_ms, before_ms), earliest first; changes made meanwhile are not seen."""
        if first_ms < before_ms:
            for run in self._transaction.scan(self._table, _bound(first_ms), _bound(before_ms - 1)):
                for chunk in run.chunks(timers_each, run.size_bytes + 1):
                    yield DueTimers(Keys(hashes_of_keys(chunk), chunk.keys), _to_ms(chunk.hashes))

    def taken(self, first_ms: int, before_ms: int) -> Iterator[DueTimers]:
        """Remove and yield timers due in [first_ms, before_ms), earliest first, in slabs of `KeysAtOnce`.

        Defer writes until all timers are taken, because each look-up searches all earlier writes.
        """
        at_once, measures = KeysAtOnce(), self._transaction.measures
        for due in self.due(first_ms, before_ms, _TAKEN_AT_ONCE):
            for some in due.pieces(at_once):
                self.remove(some.keys, some.due_ms)
                moved_bytes = measures.moved_bytes
                yield some
                at_once.learn(len(some), measures.moved_bytes - moved_bytes)

    def earliest(self, first_ms: int) -> int | None:
        """Return the earliest due time that is not before `first_ms`; None if there is no such timer."""
        start, width = _bound(first_ms), _FIRST_RANGE_MS
        while start <= MAX_HASH:
            end = min(start + width, MAX_HASH)
            for run in self._transaction.scan(self._table, start, end):
                if len(run):
                    return first_due_ms(run)
            start, width = end + 1, width * _RANGE_GROWTH
        return None


def _bound(time_ms: int) -> int:
    return int(_to_hash(np.array([time_ms], np.int64))[0])


def _to_hash(due_ms: npt.NDArray[np.int64]) -> HashArray:
    """Convert times to unsigned integers of the same order."""
    return np.ascontiguousarray(due_ms).view(np.uint64) ^ _ZERO


def _to_ms(hashes: HashArray) -> IntArray:
    return (hashes ^ _ZERO).view(np.int64)


def due_before_ms(timeout_conf: TimeoutConf, times: BatchTimes) -> int:
    """Return the time before which timers are due in a micro-batch."""
    if timeout_conf == "ProcessingTimeTimeout":
        return times.processing_ms
    return NO_TIMER if times.watermark_ms is None else times.watermark_ms


class KeyTimers:
    """The timers of a shard's keys; none is due before `earliest_ms`, and if `is_exact`, one is due at that time.

    With "NoTimeout" there are no timers and no tables, though the shard may be called to remove expired rows.
    """

    def __init__(
        self, transaction: Transaction, timeout_conf: TimeoutConf, earliest_ms: int | None, *, is_exact: bool = True
    ) -> None:
        self._transaction = transaction
        self._timeout_conf = timeout_conf
        self._by_due = Timers(transaction, TIMERS_BY_DUE)
        self._earliest_ms = None if timeout_conf == "NoTimeout" else earliest_ms
        self._is_exact = is_exact

    @staticmethod
    def tables(key_types: pa.Schema, timeout_conf: TimeoutConf) -> Mapping[str, TableSchema]:
        if timeout_conf == "NoTimeout":
            return {}
        by_key = TableSchema.of(TIMERS, key_types, pa.schema([(DUE[timeout_conf], pa.int64())]))
        return {TIMERS: by_key, TIMERS_BY_DUE: timers_schema(TIMERS_BY_DUE, key_types)}

    def get(self, keys: Keys) -> IntArray:
        """Return each key's due time; `NO_TIMER` if it has no timer."""
        if self._earliest_ms is None:
            return np.full(len(keys), NO_TIMER)
        found = self._transaction.get(TIMERS, keys)
        due_ms: IntArray = found.values.column(0).fill_null(NO_TIMER).to_numpy()
        return due_ms

    def change(self, keys: Keys, old_ms: IntArray, new_ms: IntArray) -> None:
        """Replace the timers that differ; `old_ms` is the result of `get`, `new_ms` may be `NO_TIMER`."""
        changed = new_ms != old_ms
        gone, new = np.flatnonzero(changed & (old_ms != NO_TIMER)), np.flatnonzero(changed & (new_ms != NO_TIMER))
        self._by_due.remove(keys.take(gone), old_ms[gone])
        self._by_due.add(keys.take(new), new_ms[new])
        if len(gone) and self._earliest_ms in old_ms[gone]:
            self._is_exact = False
        cleared = np.flatnonzero(changed & (new_ms == NO_TIMER))
        if len(cleared):
            self._transaction.delete(TIMERS, keys.take(cleared))
        if len(new):
            self._transaction.put(TIMERS, keys.take(new), pa.table({DUE[self._timeout_conf]: pa.array(new_ms[new])}))
            earliest_new_ms = int(new_ms[new].min())
            if self._earliest_ms is None or earliest_new_ms <= self._earliest_ms:
                self._earliest_ms, self._is_exact = earliest_new_ms, True

    def fire(self, before_ms: int) -> DueTimers | None:
        """Remove and return the timers due before `before_ms`; None if no timer is due."""
        found = list(self.due(before_ms, _TAKEN_AT_ONCE))
        if not found:
            return None
        due = DueTimers(Keys.concat([some.keys for some in found]), np.concatenate([some.due_ms for some in found]))
        self.change(due.keys, due.due_ms, np.full(len(due), NO_TIMER))
        assert self._earliest_ms is not None
        self._earliest_ms = max(self._earliest_ms, before_ms)
        return due

    def due(self, before_ms: int, timers_each: int) -> Iterator[DueTimers]:
        """Yield slabs of at most `timers_each` timers that are due before `before_ms`."""
        if self._earliest_ms is not None:
            # A past time without a due timer comes from an earlier run's table: do not keep it for ever.
            self._is_exact &= self._earliest_ms >= before_ms
            yield from self._by_due.due(self._earliest_ms, before_ms, timers_each)

    def earliest(self, none_before_ms: int) -> int | None:
        """Return the earliest due time, which the caller knows to be at least `none_before_ms`; None without timers."""
        if self._earliest_ms is None or self._is_exact:
            return self._earliest_ms
        return self._by_due.earliest(max(self._earliest_ms, none_before_ms))


class KeysAtOnce:
    """Estimates how many keys' state fits into `AT_ONCE_BYTES`, from the last keys."""

    def __init__(self, count: int = _FIRST) -> None:
        self.count = count

    def learn(self, keys: int, size_bytes: int) -> None:
        """Update the estimate with the number of bytes that these keys read and wrote."""
        self.count = max(1, min(AT_ONCE_BYTES * keys // max(1, size_bytes), _GROWTH * max(keys, self.count)))
