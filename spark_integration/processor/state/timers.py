"""A processor's timers: any number per key, registered and deleted without a read.

Two tables hold the timers: `timers` by key, for ``listTimers``, and `timers_by_due` by time
(`holdfast.spark_integration.timers`), from which timers fire.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import IntArray, from_columns
from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.spark_integration.keyed.slabs import SLAB_KEYS
from holdfast.spark_integration.processor.state.slab import CalledSlab, SlabEntries
from holdfast.spark_integration.processor.state.variable_tables import free_name
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode
from holdfast.spark_integration.tables.entry_rows import EntryRows
from holdfast.spark_integration.timers import DUE, TIMERS, TIMERS_BY_DUE, DueTimers, Timers, timers_schema

_FIRST_MS = -(1 << 63)


def timer_tables(key_types: pa.Schema, time_mode: TimeMode) -> Mapping[str, TableSchema]:
    """Return both tables' schemas; the time column is named after the clock, so that a change of clock is rejected."""
    due = pa.field(free_name(DUE[TIMEOUT_CONF[time_mode]], key_types), pa.int64())
    by_key = TableSchema.of(TIMERS, pa.schema([*key_types, due]), pa.schema([]))
    return {TIMERS: by_key, TIMERS_BY_DUE: timers_schema(TIMERS_BY_DUE, key_types)}


class ProcessorTimers:
    """A shard's timers in one call. Times are ms since 1970 and may be negative; none precedes `earliest_ms`."""

    def __init__(self, transaction: Transaction, entries: EntryRows, slab: CalledSlab, earliest_ms: int | None) -> None:
        self._entries = entries
        self._slab = slab
        self._by_due = Timers(transaction, TIMERS_BY_DUE)
        self._windows = SlabEntries(entries, slab)
        self._earliest_ms = earliest_ms
        self.begin()

    def begin(self) -> None:
        self._changed: dict[int, dict[int, bool]] = {}
        self._stored: dict[int, list[int]] = {}

    def register(self, due_ms: int) -> None:
        """Register a timer of the current key; no effect if it exists."""
        self._changed.setdefault(self._slab.current("register timer"), {})[due_ms] = True

    def delete(self, due_ms: int) -> None:
        """Delete a timer of the current key; no effect if it is absent."""
        self._changed.setdefault(self._slab.current("deleting timer"), {})[due_ms] = False

    def list(self) -> list[int]:
        """Return the times of the current key's timers, ascending."""
        at = self._slab.current("listing timers")
        if at not in self._stored:
            self._fetch(at)
        due = dict.fromkeys(self._stored[at], True) | self._changed.get(at, {})
        return sorted(due_ms for due_ms, is_set in due.items() if is_set)

    def _fetch(self, at: int) -> None:
        window = self._windows.fetch(at)
        if window is None:
            key = self._slab.keys.take(np.array([at]))
            self._stored[at] = [ms for part in self._entries.scan(key) for ms in part.own_keys.column(0).to_pylist()]
            return
        due_ms = window.entries.own_keys.column(0).to_pylist()
        for i in range(window.end - window.first):
            self._stored[window.first + i] = due_ms[window.bounds[i] : window.bounds[i + 1]]

    def flush(self) -> None:
        """Write the slab's changes."""
        for is_set in (False, True):
            changes = [(at, ms) for at, some in self._changed.items() for ms, is_on in some.items() if is_on is is_set]
            if changes:
                places, due_ms = np.array(changes, np.int64).T
                self._write(self._slab.keys.take(places), np.ascontiguousarray(due_ms), is_set=is_set)

    def _write(self, keys: Keys, due_ms: IntArray, *, is_set: bool) -> None:
        own = pa.RecordBatch.from_arrays([pa.array(due_ms)], schema=self._entries.own_key_types)
        by_key = self._entries.at(self._entries.keys_of(keys, own))
        if not is_set:
            by_key.delete()
            self._by_due.remove(keys, due_ms)
            return
        by_key.put(from_columns([], pa.schema([]), len(due_ms)))
        self._by_due.add(keys, due_ms)
        earliest_ms = int(due_ms.min())
        self._earliest_ms = earliest_ms if self._earliest_ms is None else min(self._earliest_ms, earliest_ms)

    def due(self, until_ms: int) -> Iterator[DueTimers]:
        """Yield slabs of due timers, earliest first; changes made meanwhile are not seen."""
        if self._earliest_ms is None or self._earliest_ms > until_ms:
            return
        due = self._by_due.due(self._first_ms(), until_ms + 1, SLAB_KEYS)
        self._earliest_ms = until_ms + 1  # due timers are deleted; `_write` accounts for timers registered meanwhile
        yield from due

    def earliest(self) -> int | None:
        """Return the time of the earliest timer, or None if there are no timers."""
        return None if self._earliest_ms is None else self._by_due.earliest(self._first_ms())

    def _first_ms(self) -> int:
        # The earliest time that the pointer row stores is never negative, even if the timer's time is.
        assert self._earliest_ms is not None
        return self._earliest_ms if self._earliest_ms > 0 else _FIRST_MS
