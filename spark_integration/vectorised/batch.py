"""The argument of a vectorised function: a shard's rows, state and timers in one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import IntArray, order_rows, take
from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.timers import NO_TIMER, DueTimers
from holdfast.spark_integration.vectorised.arrays import seen
from holdfast.spark_integration.vectorised.groups import Groups
from holdfast.spark_integration.vectorised.state import ShardState, ShardTimers


@dataclass(frozen=True)
class ShardBatch:
    """A shard's part of a micro-batch, grouped by key.

    Attributes
    ----------
    rows : pyarrow.Table
        The input rows with all their columns, in no particular order.
    keys : pyarrow.Table
        The distinct keys of the input rows, followed by keys without rows whose timer is due; one row per key.
    groups : Groups
        The rows of each key, and reductions over them.
    states : mapping of str to ShardState
        The state of these keys by table, to read and write.
    shard : int
        The shard's number.
    batch_id : int or None
        Id of Spark's micro-batch; None in a batch query, and if Spark does not pass it to the task: in
        ``foreachBatch`` over Spark Connect, and in ``foreachBatch`` jobs that the user's own threads start.
    watermark_ms : int or None
        Event-time watermark in ms since 1970; None if the input has none.
    processing_ms : int
        When the micro-batch was planned, in ms since 1970; a rerun has the same time.
    """

    rows: pa.Table
    keys: pa.Table
    groups: Groups
    states: Mapping[str, ShardState]
    shard: int
    batch_id: int | None
    watermark_ms: int | None
    processing_ms: int
    _timers: ShardTimers | None = field(default=None, repr=False)

    @property
    def state(self) -> ShardState:
        """The state of these keys, to read and write, if the operator has a single unnamed table.

        Raises
        ------
        InvalidArgumentError
            The operator has named tables, which are in `states`.
        """
        if STATE_TABLE not in self.states:
            raise InvalidArgumentError("the operator has named tables: use batch.states", tables=sorted(self.states))
        return self.states[STATE_TABLE]

    @property
    def timers(self) -> ShardTimers:
        """The timers of these keys, to read and set.

        Raises
        ------
        InvalidArgumentError
            The operator was defined without timers.
        """
        if self._timers is None:
            raise InvalidArgumentError("the operator has no timers: pass timeMode='EventTime' or 'ProcessingTime'")
        return self._timers


def group_rows(
    rows: pa.Table, key_columns: pa.RecordBatch, hashes: np.ndarray, key_types: pa.Schema
) -> tuple[Keys, pa.Table, Groups]:
    """Group rows by key; return the keys in hash order, the keys as the function sees them, and the groups."""
    order = order_rows(hashes, key_columns)
    first_rows = order.rows[order.first]
    keys = Keys(hashes[first_rows], take(key_columns, first_rows))
    return keys, seen(keys.columns, key_types, "key column"), Groups(rows, order)


def with_due(keys: Keys, groups: Groups, due: DueTimers) -> tuple[Keys, Groups, IntArray]:
    """Append the keys without rows whose timers are due; return the keys, their groups and their due times.

    The due time of a key whose timer is not due is `NO_TIMER`.
    """
    n = len(keys)
    both = Keys.concat([keys, due.keys])
    order = order_rows(both.hashes, both.columns)
    at = np.empty(len(both), np.int64)
    at[order.rows] = order.rows[order.first][np.cumsum(order.first) - 1]  # a key with rows comes before its timer
    without_rows = n + np.flatnonzero(at[n:] >= n)
    at[without_rows] = n + np.arange(len(without_rows))
    due_ms = np.full(n + len(without_rows), NO_TIMER)
    due_ms[at[n:]] = due.due_ms
    return both.take(np.concatenate([np.arange(n), without_rows])), groups.with_empty(len(without_rows)), due_ms
