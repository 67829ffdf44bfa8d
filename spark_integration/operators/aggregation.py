"""``groupBy(…).agg(…)`` and ``groupBy(…).window(…).agg(…)``: aggregates by key, of a window if any.

::

    rows ─▶ grouped by key ─┐
                            ├─▶ reduced ─▶ state ─▶ update: the keys that had rows
    their state ────────────┘                │
                                             └─▶ windows that are over ─▶ append: these
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import IntArray, RowOrder, one_chunk, take
from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.operators.accumulators import (
    Accumulator,
    lifted,
    reduced,
    require_same_aggregates,
    results,
    state_types,
)
from holdfast.spark_integration.operators.ends import Ends, microseconds, slabs, timestamps
from holdfast.spark_integration.operators.function import OperatorFunction
from holdfast.spark_integration.shard.operator import STATE_TABLE, ShardInput
from holdfast.spark_integration.spark_types import conform_output
from holdfast.spark_integration.vectorised.arrays import seen

#: The key column of a window, and the column of the rows that says when it ends.
WINDOW_START, WINDOW_END = "window_start", "__holdfast_end"


@dataclass(frozen=True)
class Window:
    """The windows of an aggregation."""

    column: str  #: Of the output: a struct of start and end
    length_us: int
    definition: str  #: What a restart must not change
    is_watched: bool  #: Whether there is a watermark, so that windows are over some time


@dataclass(frozen=True)
class Aggregation(OperatorFunction):
    """The `ShardFunction` of aggregates by key."""

    key_types: pa.Schema  #: As the output has them; with a window, its start is one of them
    accumulators: tuple[Accumulator, ...]
    output_types: pa.Schema
    emits: Literal["append", "update"]  #: Windows that are over; or what has changed
    window: Window | None

    @cached_property
    def _state(self) -> TableSchema:
        return TableSchema.of(STATE_TABLE, self.key_types, state_types(self.accumulators))

    @property
    def _has_ends(self) -> bool:
        return self.window is not None and self.window.is_watched

    def tables(self) -> Mapping[str, TableSchema]:
        return {STATE_TABLE: self._state, **(Ends.tables(self.key_types) if self._has_ends else {})}

    def configuration(self) -> Mapping[str, str]:
        return {"operator": "agg"} if self.window is None else {"operator": "window", "window": self.window.definition}

    def require_same_columns(self, stored: StoredTables) -> None:
        require_same_aggregates(stored, self.tables())

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        ends = Ends(transaction, batch.times) if self._has_ends else None
        if batch.rows.num_rows:
            keys, states = self._with_rows(batch, transaction, ends)
            batch.counts.keys += len(keys)
            if self.emits == "update":
                yield self._shown(keys, states, batch.operator)
        if ends is None:
            return None
        yield from self._over(ends, batch, transaction)
        return ends.earliest_ms()

    def _with_rows(self, batch: ShardInput, transaction: Transaction, ends: Ends | None) -> tuple[Keys, pa.Table]:
        """Add the rows to the state of their keys; return both."""
        keys, order = batch.distinct_keys(self._state)
        found = transaction.get(STATE_TABLE, keys)
        stored = pa.Table.from_batches([take(found.values, np.flatnonzero(found.exists))])
        parts = pa.concat_tables([lifted(self.accumulators, batch.rows), stored])
        states = reduced(self.accumulators, parts, with_stored(order, found.exists))
        transaction.put(STATE_TABLE, keys, states)
        if ends is not None:
            new = keys.take(np.flatnonzero(~found.exists))
            ends.add(new, self._ends_of(new))
        return keys, states

    def _over(self, ends: Ends, batch: ShardInput, transaction: Transaction) -> Iterator[pa.RecordBatch]:
        """Remove the windows that are over; yield them where the output has them then."""
        over = ends.take_over(batch.counts)
        if over is None:
            return
        if self.emits == "append":
            for keys in slabs(over):
                states = pa.Table.from_batches([transaction.get(STATE_TABLE, keys).values])
                yield self._shown(keys, states, batch.operator)
        transaction.delete(STATE_TABLE, over)

    def _ends_of(self, keys: Keys) -> IntArray:
        assert self.window is not None
        return microseconds(keys.columns.column(WINDOW_START)) + self.window.length_us

    def _shown(self, keys: Keys, states: pa.Table, operator: str) -> pa.RecordBatch:
        columns = shown_keys(keys, self.key_types)
        if self.window is not None:
            into_window(columns, self.window.column, self._ends_of(keys))
        columns |= results(self.accumulators, states)
        return conform_output(pa.table(columns), self.output_types, operator)


def with_stored(order: RowOrder, exists: np.ndarray) -> RowOrder:
    """Return the order of rows and, behind them, of the stored states of their keys, which come first in each.

    `exists` says which keys have a state; the j-th of these states is row n + j.
    """
    n, states = len(order.rows), int(exists.sum())
    if not states:
        return order
    before = np.cumsum(exists)
    starts = np.flatnonzero(order.first)
    rows = np.empty(n + states, np.int64)
    rows[np.arange(n) + before[np.cumsum(order.first) - 1]] = order.rows
    rows[starts[exists] + before[exists] - 1] = n + np.arange(states)
    first = np.zeros(n + states, np.bool_)
    first[starts + before - exists] = True
    return RowOrder(rows, first)


def shown_keys(keys: Keys, types: pa.Schema) -> dict[str, pa.Array]:
    """Return the output's key columns, by name."""
    shown = seen(keys.columns, types, "key column")
    return dict(zip(shown.schema.names, shown.columns, strict=True))


def into_window(columns: dict[str, pa.Array], name: str, end_us: IntArray) -> None:
    """Turn the last column, the windows' starts, into Spark's windows: structs of start and end."""
    start = one_chunk(columns.popitem()[1])
    columns[name] = pa.StructArray.from_arrays([start, timestamps(end_us, start.type)], ["start", "end"])
