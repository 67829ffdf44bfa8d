"""The timeouts of ``applyInPandasWithState``: at most one timer per key.

The `TimeoutRule` decides which timeout a call leaves behind. Spark documents that each call clears its key's timeout
unless the function sets one. But Spark's own operator acts only if there is something to write: if the function neither
updates, removes nor sets a timeout, the old one stays, and one that has fired fires again in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdfast.backends.arrow.rows import BoolArray, IntArray
from holdfast.backends.run import Keys
from holdfast.settings import TimeoutRule
from holdfast.spark_integration.tables.key_timers import NEVER, KeyTimers
from holdfast.spark_integration.tables.timers import DueTimers


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
    """The timeouts of all keys of a shard in one micro-batch."""

    def __init__(self, timers: KeyTimers, rule: TimeoutRule) -> None:
        self._timers = timers
        self._keeps_untouched = rule == "spark"

    def get(self, keys: Keys) -> IntArray:
        """Return when each key's timer is due; `NEVER` if it has none."""
        return self._timers.get(keys)

    def settle(self, keys: Keys, old_ms: IntArray, set_ms: IntArray, is_written: BoolArray) -> None:
        """Write the timeouts that calls leave behind.

        Each key had one call, which set the timeout `set_ms` or none (`NO_TIMER`); `is_written` tells if it updated or
        removed the state, `old_ms` is what `get` returned.
        """
        stays = (set_ms == NEVER) & ~is_written & self._keeps_untouched
        self._timers.change(keys, old_ms, np.where(stays, old_ms, set_ms))

    def due(self, before_ms: int, timers_each: int) -> Iterator[DueTimers]:
        """Yield the timers now due before `before_ms`, at most `timers_each` at once."""
        return self._timers.due(before_ms, timers_each)

    def earliest(self, fired_before_ms: int) -> int | None:
        """Return when the earliest timer is due, after those before `fired_before_ms` have fired."""
        # Fired timers are gone, so nothing is due before that time, unless the rule keeps them.
        return self._timers.earliest(NEVER if self._keeps_untouched else fired_before_ms)
