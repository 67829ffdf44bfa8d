"""The timeouts of ``applyInPandasWithState``: at most one timer per key.

Two tables hold them: `timers` by key, so that a new timeout finds the old one, and `timers_by_due` by time
(`holdfast.spark_integration.keyed.timers`). A key with a timer need not have state.

The `TimeoutRule` decides which timeout a call leaves behind. Spark documents that each call clears its key's timeout
unless the function sets one. But Spark's own operator acts only if there is something to write: if the function neither
updates, removes nor sets a timeout, the old one stays, and one that has fired fires again in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import BoolArray, IntArray
from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.settings import TimeoutRule
from holdfast.spark_integration.keyed.timers import DueTimers, Timers, timers_schema

TIMERS, TIMERS_BY_DUE = "timers", "timers_by_due"
_DUE = "due_ms"
#: No timer, in arrays of due times; times that can be set are positive.
NEVER = -1


class NoTimeouts:
    """Stands in for `Timeouts` in an operator without them."""

    def get(self, keys: Keys) -> IntArray:
        """See `Timeouts.get`."""
        return np.full(len(keys), NEVER)

    def settle(self, keys: Keys, old_ms: IntArray, set_ms: IntArray, is_written: BoolArray) -> None:
        """See `Timeouts.settle`."""

    def due(self, before_ms: int, timers_each: int) -> Iterator[DueTimers]:
        """See `Timeouts.due`."""
        return iter(())

    def earliest(self, fired_before_ms: int) -> int | None:
        """See `Timeouts.earliest`."""
        return None


class Timeouts:
    """The timeouts of all keys of a shard in one micro-batch.

    Parameters
    ----------
    transaction : Transaction
    rule : {"documented", "spark"}
    earliest_ms : int or None
        No timer is due earlier; None if the shard has no timer.
    """

    def __init__(self, transaction: Transaction, rule: TimeoutRule, earliest_ms: int | None) -> None:
        self._transaction = transaction
        self._by_due = Timers(transaction, TIMERS_BY_DUE)
        self._keeps_untouched = rule == "spark"
        self._earliest_ms = earliest_ms
        self._some_removed = False

    @staticmethod
    def tables(key_types: pa.Schema) -> Mapping[str, TableSchema]:
        """Return the schemas of both tables, for keys of these types."""
        by_key = TableSchema.of(TIMERS, key_types, pa.schema([(_DUE, pa.int64())]))
        return {TIMERS: by_key, TIMERS_BY_DUE: timers_schema(TIMERS_BY_DUE, key_types)}

    def get(self, keys: Keys) -> IntArray:
        """Return when each key's timer is due; `NEVER` if it has none."""
        if self._earliest_ms is None:
            return np.full(len(keys), NEVER)
        found = self._transaction.get(TIMERS, keys)
        due_ms: IntArray = found.values.column(0).fill_null(NEVER).to_numpy()
        return due_ms

    def settle(self, keys: Keys, old_ms: IntArray, set_ms: IntArray, is_written: BoolArray) -> None:
        """Write the timeouts that calls leave behind.

        Parameters
        ----------
        keys : Keys, shape (n,)
            One call each.
        old_ms : numpy.ndarray of int64, shape (n,)
            As returned by `get`.
        set_ms : numpy.ndarray of int64, shape (n,)
            The timeouts set by the calls; `NEVER` where none was set.
        is_written : numpy.ndarray of bool, shape (n,)
            Whether the call updated or removed the state.
        """
        stays = (set_ms == NEVER) & ~is_written & self._keeps_untouched
        new_ms = np.where(stays, old_ms, set_ms)
        changed = new_ms != old_ms
        gone, new = np.flatnonzero(changed & (old_ms != NEVER)), np.flatnonzero(changed & (new_ms != NEVER))
        self._by_due.remove(keys.take(gone), old_ms[gone])
        self._by_due.add(keys.take(new), new_ms[new])
        cleared = np.flatnonzero(changed & (new_ms == NEVER))
        if len(cleared):
            self._transaction.delete(TIMERS, keys.take(cleared))
        if len(new):
            self._transaction.put(TIMERS, keys.take(new), pa.table({_DUE: pa.array(new_ms[new])}))
            earliest_new_ms = int(new_ms[new].min())
            if self._earliest_ms is None or earliest_new_ms < self._earliest_ms:
                self._earliest_ms = earliest_new_ms
        self._some_removed |= bool(len(gone))

    def due(self, before_ms: int, timers_each: int) -> Iterator[DueTimers]:
        """Yield the timers now due before `before_ms`, at most `timers_each` at once."""
        if self._earliest_ms is not None:
            yield from self._by_due.due(self._earliest_ms, before_ms, timers_each)

    def earliest(self, fired_before_ms: int) -> int | None:
        """Return when the earliest timer is due, after those before `fired_before_ms` have fired."""
        if self._earliest_ms is None or not self._some_removed:
            return self._earliest_ms
        # Fired timers are gone, so nothing is due before that time, unless the rule keeps them.
        first_ms = self._earliest_ms if self._keeps_untouched else max(self._earliest_ms, fired_before_ms)
        return self._by_due.earliest(first_ms)
