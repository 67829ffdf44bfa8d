"""The interface between a shard's call and the APIs.

An `Operator` is the definition of a stateful step that is sent to the workers. Its `ShardFunction`, implemented by each
API, declares the step's state tables, and computes a shard's output from its rows in one micro-batch while it reads and
writes those tables in a transaction. `holdfast.spark_integration.shard_call.call` begins, commits and retries the
transaction in the same way for all APIs.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from holdfast.backends.arrow.rows import IntArray, RowOrder, order_rows, take_rows
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.spark_types import Watermark
from holdfast.spark_integration.transport.packed import HASH, Received

#: The version of a shard with the query's initial state, which precedes the first micro-batch.
INITIAL_VERSION = 0
#: The state table of the APIs that keep one row per key.
STATE_TABLE = "state"


@dataclass(frozen=True)
class BatchTimes:
    """The times of a micro-batch, in ms since 1970; a rerun has the same times."""

    processing_ms: int  #: When the micro-batch was planned
    watermark_ms: int | None  #: Event-time watermark; None if the input has none
    earliest_timer_ms: int | None  #: No timer of the shard is due earlier; None if the shard has no timer
    #: `processing_ms` of the shard's previous call; None in the first call. May be later if a clock was set back.
    previous_ms: int | None

    def by_event_time(self) -> BatchTimes:
        """Return the times by event time: the watermark, and a previous call just before the earliest timer."""
        earliest_ms = self.earliest_timer_ms
        return replace(
            self, processing_ms=self.watermark_ms or 0, previous_ms=None if earliest_ms is None else earliest_ms - 1
        )


@dataclass
class CallCounts:
    """Counts that a function keeps for the metrics."""

    keys: int = 0  #: Keys for which the user's function was called
    timers_due: int = 0  #: Timers that have fired


@dataclass(frozen=True)
class ShardInput:
    """One shard's part of a micro-batch."""

    operator: str  #: The operator's name, for error messages
    shard: int
    batch_id: int | None  #: Id of Spark's micro-batch; None in a batch query, or if unknown
    rows: pa.Table  #: In no particular order; empty if the shard is called only for its timers or all rows are late
    shown_keys: pa.Table  #: The key of each row, in Spark's form
    hashes: pa.Array  #: Spark's ``xxhash64`` of each row's key, as int64
    times: BatchTimes
    late: int = 0  #: Number of rows dropped as late
    counts: CallCounts = field(default_factory=CallCounts)  #: Incremented by the function

    def without_previous_call(self) -> ShardInput:
        """Return the input without the time of the shard's previous call."""
        return replace(self, times=replace(self.times, previous_ms=None))

    def keys(self, schema: TableSchema) -> Keys:
        """Return each row's key for look-ups in a table: normalised, with storage types."""
        return Keys.of(schema, self.hashes.to_numpy(), self.shown_keys)

    def distinct_keys(self, schema: TableSchema) -> tuple[Keys, RowOrder]:
        """Return the distinct keys, in the form of `keys`, and the order of the rows by key."""
        every_key = self.keys(schema)
        order = order_rows(every_key.hashes, every_key.columns)
        return every_key.take(order.rows[order.first]), order

    def keys_shown_at(self, rows: IntArray) -> pa.Table:
        """Return the keys of the given rows, in Spark's form."""
        return take_rows(self.shown_keys.to_batches(), rows)


class ShardFunction(Protocol):
    """An API's computation for a shard in a micro-batch; sent to the workers, so it holds no credentials."""

    def tables(self) -> Mapping[str, TableSchema]:
        """Return the schemas of the state tables."""

    def changes(self) -> Mapping[str, ColumnChanges]:
        """Return the columns that the user drops and renames, by table; a repeated change has no effect."""

    def configuration(self) -> Mapping[str, str]:
        """Return the configuration that must not change; kept in the operator's record."""

    def require_restartable(self, stored: StoredTables, configuration: Mapping[str, str]) -> None:
        """Check that the operator can continue from an earlier run's state.

        Parameters
        ----------
        stored : StoredTables
            The tables of the earlier state, with this operator's `changes`.
        configuration : mapping of str to str
            The result of `configuration` in the run that created the state.

        Raises
        ------
        SchemaMismatchError
            The operator cannot continue from the state.
        """

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        """Read and write state, and yield the output.

        Returns
        -------
        int or None
            When the shard's earliest remaining timer is due, in ms since 1970; None if no timer remains.

        Notes
        -----
        May be called again for the same micro-batch after a failure, with the same state.
        """


@dataclass(frozen=True)
class Operator:
    """The definition of a stateful step, sent to the workers; holds no credentials."""

    name: str
    definition_id: str  #: New for each definition; distinguishes two operators with the same name
    function: ShardFunction
    shards: int
    key_columns: list[str]  #: Columns of the received table that hold the keys
    row_columns: list[str]  #: Columns of the received table that the function sees as rows
    key_names: list[str]  #: Names of the keys in the function
    watermark: Watermark | None  #: The input's watermark; None if it has none
    settings: Settings
    #: The version that micro-batch 0 commits; the initial state, which precedes it, has `INITIAL_VERSION`
    first_version: int = 1
    fires_by_watermark: bool = False  #: Whether the timers' clock is the watermark

    @property
    def held_back_ms(self) -> int:
        """How far the operator's own watermark lags behind Spark's."""
        return 0 if self.watermark is None else self.watermark.held_back_ms

    @property
    def wake_delay_ms(self) -> int:
        """How much later a timer is due by Spark's clock than by the operator's."""
        return self.held_back_ms if self.fires_by_watermark else 0

    def input_of(self, received: Received, shard: int, batch_id: int | None, times: BatchTimes) -> ShardInput:
        rows = received.rows
        return ShardInput(
            operator=self.name,
            shard=shard,
            batch_id=batch_id,
            rows=rows.select(self.row_columns),
            shown_keys=rows.select(self.key_columns).rename_columns(self.key_names).combine_chunks(),
            hashes=rows.column(HASH).combine_chunks(),
            times=times,
            late=received.late,
        )
