"""The timeouts of ``applyInPandasWithState``: at most one timer a key, and what each call leaves of it.

What a call leaves is decided by a `TimeoutRule`. Spark documents that each call clears the timeout of its key, unless
the function sets one. What Spark's own operator does is decided by whether there is something to write: where a
function neither updates, nor removes, nor sets a timeout, the old one stays, and one that has fired fires again in
every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import BoolArray, IntArray
from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.settings import TimeoutRule
from holdfast.spark_integration.tables.key_timers import NEVER, KeyTimers
from holdfast.spark_integration.tables.timers import DueTimers


class NoTimeouts:
    """What an operator has that was defined without timeouts."""

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
        No timer is due before it; None where the shard has none.
    """

    def __init__(self, transaction: Transaction, rule: TimeoutRule, earliest_ms: int | None) -> None:
        self._timers = KeyTimers(transaction, earliest_ms)
        self._keeps_untouched = rule == "spark"

    @staticmethod
    def tables(key_types: pa.Schema) -> Mapping[str, TableSchema]:
        """Return the schemas of the tables for keys of these types."""
        return KeyTimers.tables(key_types)

    def get(self, keys: Keys) -> IntArray:
        """Return when the timer of each key is due; `NEVER` where it has none."""
        return self._timers.get(keys)

    def settle(self, keys: Keys, old_ms: IntArray, set_ms: IntArray, is_written: BoolArray) -> None:
        """Write what calls have left.

        Parameters
        ----------
        keys : Keys, shape (n,)
            One call each.
        old_ms : numpy.ndarray of int64, shape (n,)
            As `get` gave them.
        set_ms : numpy.ndarray of int64, shape (n,)
            What the calls have set; `NEVER` where they have not.
        is_written : numpy.ndarray of bool, shape (n,)
            Whether the call updated or removed the state.
        """
        stays = (set_ms == NEVER) & ~is_written & self._keeps_untouched
        self._timers.change(keys, old_ms, np.where(stays, old_ms, set_ms))

    def due(self, before_ms: int, timers_each: int) -> Iterator[DueTimers]:
        """Yield the timers that are due before a time, as they are now; at most so many at once."""
        return self._timers.due(before_ms, timers_each)

    def earliest(self, fired_before_ms: int) -> int | None:
        """Return when the earliest timer is due that there is now, once those before a time have fired."""
        # Fired timers are gone, so nothing is due before: unless they stay.
        return self._timers.earliest(NEVER if self._keeps_untouched else fired_before_ms)
