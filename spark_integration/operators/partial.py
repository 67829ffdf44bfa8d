"""Aggregates a task's rows by key before the shuffle if keys repeat; Spark's own aggregation always does.

::

    rows ─▶ do keys repeat? ─ yes ─▶ a state per key ─────┐
                            ─ no ──▶ the rows ────────────┴═shuffle═▶ states ─▶ `Aggregation`

The window is part of the key, so a late row never shares a state with a row that is on time. If windows overlap, rows
are first aggregated by pane: `holdfast.spark_integration.operators.panes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import order_rows, take
from holdfast.backends.run import Keys, TableSchema
from holdfast.spark_integration.operators.accumulators import Accumulator, lifted, reduced
from holdfast.spark_integration.operators.panes import WindowPlaces, hashed, seeds_of
from holdfast.spark_integration.transport.packed import BLOB_BYTES, HASH, keys_repeat
from holdfast.spark_integration.ttl.ends import microseconds, timestamps

#: Prefix of received columns that hold states.
_STATE = "__holdfast_state."
#: Limits the windows in memory at once: a pane may be in thousands of windows.
_WINDOWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class PartialAggregation:
    """The `Combiner` of aggregates by key."""

    accumulators: tuple[Accumulator, ...]
    state: TableSchema  #: Its keys are columns of the rows
    time: str | None  #: The column that decides whether a row is late
    places: WindowPlaces | None  #: For overlapping windows: the last key of rows is a pane, not a window

    def received(self, sent: pa.Schema) -> pa.Schema:
        states = [field.with_name(_STATE + field.name) for field in self.state.value]
        return pa.schema([*(sent.field(name) for name in self._kept), *states])

    def spread(self, batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        return batches if self.places is None else self._in_windows(batches, self.places)

    def partial(self, rows: pa.Table) -> pa.Table:
        return self._with_states(rows, lifted(self.accumulators, rows))

    def combined(self, rows: pa.Table) -> pa.Table:
        hashes = rows.column(HASH).combine_chunks().to_numpy()
        keys = Keys.of(self.state, hashes, rows.select(self.state.key.names).combine_chunks())
        order = order_rows(keys.hashes, keys.columns)
        has_states = rows.column_names[-1].startswith(_STATE)
        states = received_states(self.state.value, rows) if has_states else lifted(self.accumulators, rows)
        one_each = rows.take(pa.array(order.rows[order.first]))
        return self._with_states(one_each, reduced(self.accumulators, states, order))

    @property
    def _kept(self) -> list[str]:
        return [*self.state.key.names, *([] if self.time is None else [self.time]), HASH]

    def _with_states(self, rows: pa.Table, states: pa.Table) -> pa.Table:
        columns = [rows.column(name) for name in self._kept]
        return pa.Table.from_arrays([*columns, *states.columns], schema=self.received(rows.schema))

    def _in_windows(self, batches: Iterable[pa.RecordBatch], places: WindowPlaces) -> Iterator[pa.RecordBatch]:
        """Yield each row, or each pane's state if panes repeat, once per window."""
        keeps_order = any(one.is_by_arrival for one in self.accumulators)
        are_states: bool | None = None  # set by the first batches: a task sends either rows or states
        for some in _gathered(batches):
            if are_states is None:
                are_states = not keeps_order and keys_repeat(some)
            rows = pa.Table.from_batches(some).combine_chunks()
            panes = self.combined(rows).combine_chunks() if are_states else rows
            windows_at_once = max(1, min(_WINDOWS_AT_ONCE, BLOB_BYTES * panes.num_rows // panes.nbytes))
            panes_at_once = max(1, windows_at_once * places.slide_us // places.length_us)
            for batch in panes.to_batches(max_chunksize=panes_at_once):
                yield from self._of_panes(batch, places, windows_at_once)

    def _of_panes(self, panes: pa.RecordBatch, places: WindowPlaces, windows_at_once: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of panes once per window, with Spark's hash of key and window."""
        start_name = self.state.key.names[-1]
        start = panes.column(start_name)
        pane_us = microseconds(start)
        pane, window_us = places.windows_of(pane_us)
        seeds = seeds_of(panes.column(HASH).to_numpy().view(np.uint64), pane_us)
        own = {start_name: timestamps(window_us, start.type)}
        if self.time is not None:
            own[self.time] = timestamps(window_us + places.length_us, start.type)
        own[HASH] = pa.array(hashed(seeds[pane], window_us).view(np.int64))
        for first in range(0, len(pane), windows_at_once):
            rows = take(panes, pane[first : first + windows_at_once])
            columns = dict(zip(rows.schema.names, rows.columns, strict=True))
            columns |= {name: column.slice(first, windows_at_once) for name, column in own.items()}
            yield pa.RecordBatch.from_arrays([*columns.values()], schema=rows.schema)


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yield groups of non-empty batches, each large enough to fill a blob."""
    held: list[pa.RecordBatch] = []
    held_bytes = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            held_bytes += batch.nbytes
        if held_bytes >= BLOB_BYTES:
            yield held
            held, held_bytes = [], 0
    if held:
        yield held


def received_states(types: pa.Schema, rows: pa.Table) -> pa.Table:
    return pa.Table.from_arrays([rows.column(_STATE + name) for name in types.names], schema=types)
