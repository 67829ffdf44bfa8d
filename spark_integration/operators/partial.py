"""Aggregates a task's rows by key before the shuffle, where keys repeat. Spark's own aggregation always does.

::

    rows ─▶ do keys repeat? ─ yes ─▶ a state for each key ─┐
                            ─ no ──▶ the rows ─────────────┴═shuffle═▶ states ─▶ `Aggregation`

A window is one of the keys, so a late row never shares a state with one that is on time.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from holdfast.backends.arrow.rows import order_rows
from holdfast.backends.run import Keys, TableSchema
from holdfast.spark_integration.operators.accumulators import Accumulator, lifted, reduced
from holdfast.spark_integration.transport.packed import HASH

#: Prefix of the columns that hold states among the received ones.
_STATE = "__holdfast_state."


@dataclass(frozen=True)
class PartialAggregation:
    """The `Combiner` of aggregates by key."""

    accumulators: tuple[Accumulator, ...]
    state: TableSchema  #: Whose keys are columns of the rows
    time: str | None  #: The column by which rows are late

    def received(self, sent: pa.Schema) -> pa.Schema:
        states = [field.with_name(_STATE + field.name) for field in self.state.value]
        return pa.schema([*(sent.field(name) for name in self._kept), *states])

    def partial(self, rows: pa.Table) -> pa.Table:
        return self._with_states(rows, lifted(self.accumulators, rows))

    def combined(self, rows: pa.Table) -> pa.Table:
        hashes = rows.column(HASH).combine_chunks().to_numpy()
        keys = Keys.of(self.state, hashes, rows.select(self.state.key.names).combine_chunks())
        order = order_rows(keys.hashes, keys.columns)
        states = reduced(self.accumulators, lifted(self.accumulators, rows), order)
        return self._with_states(rows.take(pa.array(order.rows[order.first])), states)

    @property
    def _kept(self) -> list[str]:
        return [*self.state.key.names, *([] if self.time is None else [self.time]), HASH]

    def _with_states(self, rows: pa.Table, states: pa.Table) -> pa.Table:
        columns = [rows.column(name) for name in self._kept]
        return pa.Table.from_arrays([*columns, *states.columns], schema=self.received(rows.schema))


def received_states(types: pa.Schema, rows: pa.Table) -> pa.Table:
    """Return the states among received rows."""
    return pa.Table.from_arrays([rows.column(_STATE + name) for name in types.names], schema=types)
