"""``dropDuplicates(…)`` and ``dropDuplicatesWithinWatermark(…)``: each key's first row, and the key for a while.

::

    rows ─▶ the first of each key ─▶ those without state ─▶ out
                                            └─▶ state: until ─▶ forgotten once the clock has passed it
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import one_chunk, order_rows, take_rows
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.run import TableSchema
from holdfast.mvcc import Transaction
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.operators.ends import Ends, microseconds, timestamps
from holdfast.spark_integration.operators.restarting import require_same_operator
from holdfast.spark_integration.shard.operator import STATE_TABLE, ShardInput
from holdfast.spark_integration.shard.timeout import TimeMode
from holdfast.spark_integration.spark_types import conform_output
from holdfast.spark_integration.tables.restarting import require_readable_tables
from holdfast.spark_integration.transport.transport import moments_of

UNTIL = "until"
_UNTIL = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class Deduplication:
    """The `ShardFunction` of deduplication.

    Attributes
    ----------
    key_types, output_types : pyarrow.Schema
    event_time : str or None
        The column of the rows by which keys are forgotten; None for the micro-batch's own time.
    ttl_us : int or None
        How long after it a key is forgotten; None for never.
    keeps_without_time : bool
        Whether a key without a time is never forgotten: where the time is a part of the key, and says alone when its
        duplicates are late.
    """

    key_types: pa.Schema
    output_types: pa.Schema
    event_time: str | None
    ttl_us: int | None
    keeps_without_time: bool = False

    @property
    def time_mode(self) -> TimeMode:
        """The clock by which the shard is called without rows; a key that is forgotten late does no harm."""
        return "EventTime" if self.event_time is not None else "None"

    @cached_property
    def _state(self) -> TableSchema:
        return TableSchema.of(STATE_TABLE, self.key_types, pa.schema([(UNTIL, _UNTIL)]))

    def tables(self) -> Mapping[str, TableSchema]:
        return {STATE_TABLE: self._state, **Ends.tables(self.key_types)}

    def changes(self) -> Mapping[str, ColumnChanges]:
        return {}

    def configuration(self) -> Mapping[str, str]:
        return {"operator": "dropDuplicates", "clock of ttl": "none" if self.ttl_us is None else self._clock}

    @property
    def _clock(self) -> str:
        return "processing time" if self.event_time is None else "event time"

    def require_restartable(self, stored: StoredTables, configuration: Mapping[str, str]) -> None:
        require_same_operator(configuration, self.configuration())
        require_readable_tables(stored, self.tables())

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        is_by_calls = self.event_time is None
        ends = Ends.by_calls(transaction, batch.times) if is_by_calls else Ends(transaction, batch.times)
        if is_by_calls:
            # The key that comes again is new, however long ago its time was up.
            _forget(ends, batch, transaction)
        if batch.rows.num_rows:
            every_key = batch.keys(self._state)
            order = order_rows(every_key.hashes, every_key.columns)
            first_rows = order.rows[order.first]
            keys = every_key.take(first_rows)
            batch.counts.keys += len(keys)
            new = np.flatnonzero(~transaction.get(STATE_TABLE, keys).exists)
            if len(new):
                fresh, rows = keys.take(new), take_rows(batch.rows.to_batches(), first_rows[new])
                until = self._until(rows, batch)
                ending = np.flatnonzero(until.is_valid().to_numpy(zero_copy_only=False))
                ends.add(fresh.take(ending), microseconds(until.drop_null()))
                transaction.put(STATE_TABLE, fresh, pa.table({UNTIL: until}))
                yield conform_output(rows, self.output_types, batch.operator)
        if is_by_calls:
            return None
        # As in Spark, a duplicate in the micro-batch in which its key's time is up still is one.
        _forget(ends, batch, transaction)
        return ends.earliest_ms()

    def _until(self, rows: pa.Table, batch: ShardInput) -> pa.Array:
        """Return when the keys of some rows are forgotten; null for never."""
        if self.ttl_us is None:
            return pa.nulls(rows.num_rows, _UNTIL)
        if self.event_time is None:
            return timestamps(np.full(rows.num_rows, batch.times.processing_ms * 1000 + self.ttl_us), _UNTIL)
        at = one_chunk(moments_of(rows.column(self.event_time))).cast(pa.int64())
        if not self.keeps_without_time:
            at = at.fill_null(0)  # as in Spark, where a row without a time is soon forgotten
        return pc.add(at, self.ttl_us).view(_UNTIL)


def _forget(ends: Ends, batch: ShardInput, transaction: Transaction) -> None:
    """Remove the keys whose time is up."""
    over = ends.take_over()
    if over is not None:
        batch.counts.timers_due += len(over.keys)
        transaction.delete(STATE_TABLE, over.keys)
