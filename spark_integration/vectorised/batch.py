"""What a vectorised operator function is called with: one shard's rows of one micro-batch, its state and its timers."""

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
    """One shard's part of a micro-batch, grouped by key.

    Attributes
    ----------
    rows : pyarrow.Table
        The input rows with all their columns, in no particular order.
    keys : pyarrow.Table
        The distinct keys of these rows, one row each, followed by keys without rows whose timer is due.
    groups : Groups
        Which row belongs to which key, and reductions over each key's rows.
    states : mapping of str to ShardState
        State of these keys by table, to read and write.
    shard : int
        Number of the shard.
    batch_id : int or None
        Spark's micro-batch; None in a batch query, and where Spark does not reveal it: in ``foreachBatch`` over Spark
        Connect, and in jobs started there from a thread of the user's.
    watermark_ms : int or None
        Event-time watermark in ms since 1970; None if the input has none.
    processing_ms : int
        When the micro-batch was planned, in ms since 1970; the same if it runs again.
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
        """State of these keys, to read and write, if the operator has one unnamed table.

        Raises
        ------
        InvalidArgumentError
            The operator has named tables: see `states`.
        """
        if STATE_TABLE not in self.states:
            raise InvalidArgumentError("the operator has named tables: use batch.states", tables=sorted(self.states))
        return self.states[STATE_TABLE]

    @property
    def timers(self) -> ShardTimers:
        """Timers of these keys, to read and set.

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
    """Group rows by key; return the keys ascending by hash, as the function sees them, and the groups."""
    order = order_rows(hashes, key_columns)
    first_rows = order.rows[order.first]
    keys = Keys(hashes[first_rows], take(key_columns, first_rows))
    return keys, seen(keys.columns, key_types, "key column"), Groups(rows, order)


def with_due(keys: Keys, groups: Groups, due: DueTimers) -> tuple[Keys, Groups, IntArray]:
    """Add the keys whose timers are due; return them after those with rows.

    Also returns the groups, and when each key's timer was due, or `NO_TIMER`.
    """
    n = len(keys)
    both = Keys.concat([keys, due.keys])
    order = order_rows(both.hashes, both.columns)
    at = np.empty(len(both), np.int64)
    at[order.rows] = order.rows[order.first][np.cumsum(order.first) - 1]  # a key with rows stands before its timer
    without_rows = n + np.flatnonzero(at[n:] >= n)
    at[without_rows] = n + np.arange(len(without_rows))
    due_ms = np.full(n + len(without_rows), NO_TIMER)
    due_ms[at[n:]] = due.due_ms
    return both.take(np.concatenate([np.arange(n), without_rows])), groups.with_empty(len(without_rows)), due_ms
