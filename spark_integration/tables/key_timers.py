"""At most one timer per key.

Two tables hold them: `timers` by key, so that a new timer finds the old one, and `timers_by_due` by time
(`holdfast.spark_integration.tables.timers`). A key with a timer need not have state.

The column of `timers` is named after the clock. So an operator that is given the other clock has other columns and is
refused, as its timers would be due in another century.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import IntArray
from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.spark_integration.shard.timeout import TIMERS_TABLE, TimeoutConf
from holdfast.spark_integration.tables.timers import DueTimers, Timers, timers_schema

if TYPE_CHECKING:
    # With it come pandas, and a second: who only looks at tables needs neither.
    from holdfast.spark_integration.shard.operator import BatchTimes

TIMERS, TIMERS_BY_DUE = TIMERS_TABLE, "timers_by_due"
#: The column of `timers` that says when one is due, by clock.
DUE: Mapping[TimeoutConf, str] = {"EventTimeTimeout": "due_ms", "ProcessingTimeTimeout": "due_processing_ms"}
#: No timer, in arrays of due times; times that can be set are not negative.
NEVER = -1
_TAKEN_AT_ONCE = 65_536


def due_before_ms(timeout_conf: TimeoutConf, times: BatchTimes) -> int:
    """Return the time before which timers are due in a micro-batch."""
    if timeout_conf == "ProcessingTimeTimeout":
        return times.processing_ms
    return NEVER if times.watermark_ms is None else times.watermark_ms


class KeyTimers:
    """The timers of all keys of a shard in one micro-batch; times are in ms since 1970.

    No timer is due before `earliest_ms` (None: the shard has none); `is_exact` says that one is due at that very time.

    Threads: one at a time, like the transaction.
    """

    def __init__(
        self, transaction: Transaction, timeout_conf: TimeoutConf, earliest_ms: int | None, *, is_exact: bool = True
    ) -> None:
        self._transaction = transaction
        self._column = DUE[timeout_conf]
        self._by_due = Timers(transaction, TIMERS_BY_DUE)
        self._earliest_ms = earliest_ms
        self._is_exact = is_exact

    @staticmethod
    def tables(key_types: pa.Schema, timeout_conf: TimeoutConf) -> Mapping[str, TableSchema]:
        """Return the schemas of both tables, for keys of these types and timers of one clock."""
        by_key = TableSchema.of(TIMERS, key_types, pa.schema([(DUE[timeout_conf], pa.int64())]))
        return {TIMERS: by_key, TIMERS_BY_DUE: timers_schema(TIMERS_BY_DUE, key_types)}

    def get(self, keys: Keys) -> IntArray:
        """Return when each key's timer is due; `NEVER` if it has none."""
        if self._earliest_ms is None:
            return np.full(len(keys), NEVER)
        found = self._transaction.get(TIMERS, keys)
        due_ms: IntArray = found.values.column(0).fill_null(NEVER).to_numpy()
        return due_ms

    def change(self, keys: Keys, old_ms: IntArray, new_ms: IntArray) -> None:
        """Replace each timer that differs.

        `old_ms` is what `get` returned, `new_ms` is `NO_TIMER` for none; each key comes once.
        """
        changed = new_ms != old_ms
        gone, new = np.flatnonzero(changed & (old_ms != NEVER)), np.flatnonzero(changed & (new_ms != NEVER))
        self._by_due.remove(keys.take(gone), old_ms[gone])
        self._by_due.add(keys.take(new), new_ms[new])
        if len(gone) and self._earliest_ms in old_ms[gone]:
            self._is_exact = False
        cleared = np.flatnonzero(changed & (new_ms == NEVER))
        if len(cleared):
            self._transaction.delete(TIMERS, keys.take(cleared))
        if len(new):
            self._transaction.put(TIMERS, keys.take(new), pa.table({self._column: pa.array(new_ms[new])}))
            earliest_new_ms = int(new_ms[new].min())
            if self._earliest_ms is None or earliest_new_ms <= self._earliest_ms:
                self._earliest_ms, self._is_exact = earliest_new_ms, True

    def fire(self, before_ms: int) -> DueTimers | None:
        """Remove the timers due before `before_ms` and return them; None if there are none."""
        found = list(self.due(before_ms, _TAKEN_AT_ONCE))
        if not found:
            return None
        due = DueTimers(Keys.concat([some.keys for some in found]), np.concatenate([some.due_ms for some in found]))
        self.change(due.keys, due.due_ms, np.full(len(due), NEVER))
        assert self._earliest_ms is not None
        self._earliest_ms = max(self._earliest_ms, before_ms)
        return due

    def due(self, before_ms: int, timers_each: int) -> Iterator[DueTimers]:
        """Yield the timers now due before `before_ms`, at most `timers_each` at once."""
        if self._earliest_ms is not None:
            # If none is due at that time, it was that of a table of an earlier run, and would stay for ever.
            self._is_exact &= self._earliest_ms >= before_ms
            yield from self._by_due.due(self._earliest_ms, before_ms, timers_each)

    def earliest(self, none_before_ms: int) -> int | None:
        """Return when the earliest timer is due.

        The caller knows that none is due before `none_before_ms`, or passes `NO_TIMER`.
        """
        if self._earliest_ms is None or self._is_exact:
            return self._earliest_ms
        return self._by_due.earliest(max(self._earliest_ms, none_before_ms))
