"""``dropDuplicates(…)`` and ``dropDuplicatesWithinWatermark(…)``: yield each key's first row and store the key.

::

    rows ─▶ the first row per key ─▶ keys without state ─▶ out
                                            └─▶ state: until ─▶ forgotten once the clock passes it

The clock moves between micro-batches; duplicates in the micro-batch that expires a key are still dropped, as in Spark.
With a time to live in event time, which Spark lacks, the rows' own times decide instead::

    rows of a key    09:00   09:20             10:10   10:30        ttl of an hour
                       ▲ shown, until 10:00      ▲ shown, until 11:10
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from holdfast.backends.arrow.rows import IntArray, RowOrder, one_chunk, take_rows
from holdfast.backends.base import Found
from holdfast.backends.run import TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.mvcc import Transaction
from holdfast.spark_integration.plan.arguments import duration_us
from holdfast.spark_integration.plan.definition import BEHIND_ANOTHER, KeyedRows, operator_plan
from holdfast.spark_integration.plan.event_time import TimeColumn, time_column_of
from holdfast.spark_integration.plan.grouping_keys import resolve_keys
from holdfast.spark_integration.shard.operator import STATE_TABLE, ShardInput
from holdfast.spark_integration.spark_types import arrow_schema, conform_output, types_of_keys
from holdfast.spark_integration.tables.restarting import OperatorFunction
from holdfast.spark_integration.ttl.ends import UNTIL, Ends, Ttl, forget_rows, microseconds, until_us

_LONG_AGO = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Deduplication(OperatorFunction):
    """The `ShardFunction` of Spark's deduplication, and of deduplication in processing time."""

    key_types: pa.Schema
    output_types: pa.Schema
    ttl: Ttl | None  #: Time after which a key is forgotten; None for never
    #: Whether a key without a time is never forgotten: true if the time is part of the key and alone decides which
    #: duplicates are late
    keeps_without_time: bool = False

    @cached_property
    def _state(self) -> TableSchema:
        return TableSchema.of(STATE_TABLE, self.key_types, pa.schema([UNTIL]))

    def tables(self) -> Mapping[str, TableSchema]:
        return {STATE_TABLE: self._state, **Ends.tables(self.key_types)}

    def configuration(self) -> Mapping[str, str]:
        return {"operator": "dropDuplicates", "clock of ttl": "none" if self.ttl is None else self.ttl.clock}

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        ends = None if self.ttl is None else self.ttl.ends(transaction, batch.times)
        is_by_calls = self.ttl is not None and self.ttl.event_time is None
        if ends is not None and is_by_calls:
            # Expired keys are removed first: a returning key counts as new.
            self._forget(ends, batch, transaction)
        if batch.rows.num_rows:
            yield from self._with_rows(batch, transaction, ends)
        if self.ttl is None or ends is None:
            return None
        if not is_by_calls:
            self._forget(ends, batch, transaction)
        return self.ttl.next_call_ms(ends)

    def _with_rows(self, batch: ShardInput, transaction: Transaction, ends: Ends | None) -> Iterator[pa.RecordBatch]:
        """Store the keys of the rows, and yield the first row of each new key."""
        keys, order = batch.distinct_keys(self._state)
        batch.counts.keys += len(keys)
        found = transaction.get(STATE_TABLE, keys)
        key, rows = self._first_rows(batch, order, found)
        if not len(key):
            return
        fresh, shown = keys.take(key), take_rows(batch.rows.to_batches(), rows)
        until = self._until(shown, batch)
        if ends is not None:
            is_entered = ~found.exists[key] & until.is_valid().to_numpy(zero_copy_only=False)
            is_entered[1:] &= key[1:] != key[:-1]
            entered = np.flatnonzero(is_entered)
            ends.add(fresh.take(entered), microseconds(until.take(pa.array(entered))))
        transaction.put(STATE_TABLE, fresh, pa.table({UNTIL.name: until}))
        yield conform_output(shown, self.output_types, batch.operator)

    def _first_rows(self, batch: ShardInput, order: RowOrder, found: Found) -> tuple[IntArray, IntArray]:
        """Return the keys with rows to show, ascending, and these rows; a key's last row sets its expiry."""
        new = np.flatnonzero(~found.exists)
        return new, order.rows[order.first][new]

    def _until(self, rows: pa.Table, batch: ShardInput) -> pa.Array:
        """Return the expiry of each row's key; null for never."""
        if self.ttl is None:
            return pa.nulls(rows.num_rows, UNTIL.type)
        until = self.ttl.until(rows, batch.times)
        if not self.keeps_without_time or self.ttl.event_time is None:
            return until
        return pc.if_else(one_chunk(rows.column(self.ttl.event_time)).is_valid(), until, pa.scalar(None, UNTIL.type))

    def _forget(self, ends: Ends, batch: ShardInput, transaction: Transaction) -> None:
        """Remove expired keys."""
        for over in ends.over(batch.counts):
            transaction.delete(STATE_TABLE, over)


class DeduplicationByTime(Deduplication):
    """The `ShardFunction` of deduplication with a time to live in event time: rows' own times decide which are new."""

    def _first_rows(self, batch: ShardInput, order: RowOrder, found: Found) -> tuple[IntArray, IntArray]:
        assert self.ttl is not None
        until = until_us(self.ttl.until(batch.rows, batch.times))
        stored = until_us(found.values.column(UNTIL.name))
        return first_rows(order.key_of_row, until, np.where(found.exists, stored, _LONG_AGO), self.ttl.length_us)

    def _forget(self, ends: Ends, batch: ShardInput, transaction: Transaction) -> None:
        forget_rows(ends, batch, transaction)


def first_rows(key: IntArray, until: IntArray, stored: IntArray, ttl: int) -> tuple[IntArray, IntArray]:
    """Return the keys and indices of new rows: those past the expiry of their key's last new row, at first `stored`."""
    rows = np.lexsort((until, key))
    key, at = key[rows], until[rows] - ttl
    times, rank = np.unique(np.concatenate([at, until[rows], stored]), return_inverse=True)
    at_rank, until_rank, stored_rank = np.split(rank, [len(at), 2 * len(at)])
    place = key * len(times) + at_rank
    after = np.searchsorted(place, key * len(times) + until_rank)  # per row, the next row that is new
    here = np.searchsorted(place, np.arange(len(stored)) * len(times) + stored_rank)
    of_key, found = np.arange(len(stored)), []
    while len(of_key):
        is_there = here < len(key)
        is_there[is_there] = key[here[is_there]] == of_key[is_there]
        of_key, here = of_key[is_there], here[is_there]
        found.append(here)
        here = after[here]
    chosen = np.sort(np.concatenate(found))
    return key[chosen], rows[chosen]


def deduplicated(df: DataFrame, subset: Sequence[str] | None, ttl: str | None, name: str) -> DataFrame:
    """Define ``dropDuplicates``. Raises Spark's errors; `InvalidArgumentError` for a bad setting, `ttl` or type."""
    _ = df.dropDuplicates(subset).schema  # type: ignore[arg-type]  # raises Spark's errors
    kind = Deduplication if ttl is None else DeduplicationByTime
    time = time_column_of(df) if df.isStreaming else None
    rows = _rows(df, subset, time, None if ttl is None else duration_us(df, ttl), kind)
    # With a watermark, Spark drops late rows even if keys are never forgotten.
    return operator_plan(rows, StructType(df.schema.fields), "append", name, is_timed=time is not None)


def _rows(
    df: DataFrame,
    subset: Sequence[str] | None,
    time: TimeColumn | None,
    ttl_us: int | None,
    by_event_time: type[Deduplication],
) -> KeyedRows:
    keys = resolve_keys(df, list(df.columns if subset is None else subset))
    is_in_key = time is not None and time.field.name in [key.field.name for key in keys.keys]
    is_late_then = ttl_us is None and is_in_key
    if is_late_then:
        ttl_us = 0  # once the watermark passes the key, its duplicates are late
    kind, clock = (Deduplication, None) if time is None else (by_event_time, time.field.name)
    function = kind(
        types_of_keys([key.field for key in keys.keys]),
        arrow_schema(StructType(df.schema.fields), "the input", keep_not_null=True),
        None if ttl_us is None else Ttl(ttl_us, clock),
        keeps_without_time=is_late_then,
    )
    return KeyedRows(df, keys.keys, function)


def deduplicated_within_watermark(df: DataFrame, subset: Sequence[str] | None, name: str) -> DataFrame:
    """Define ``dropDuplicatesWithinWatermark``; see `deduplicated`. Also raises without a watermark."""
    _ = df.dropDuplicatesWithinWatermark(subset).schema  # type: ignore[arg-type]  # raises Spark's errors
    time = time_column_of(df) if df.isStreaming else None
    if time is None:
        raise InvalidArgumentError(
            "dropDuplicatesWithinWatermark needs a stream with a watermark: df.withWatermark('at', '10 minutes'), "
            f"within which duplicates are found{BEHIND_ANOTHER}"
        )
    rows = _rows(df, subset, time, time.watermark.delay_ms * 1000, Deduplication)
    return operator_plan(rows, StructType(df.schema.fields), "append", name, is_timed=True)
