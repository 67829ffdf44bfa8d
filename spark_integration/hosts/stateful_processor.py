"""Spark's own ``transformWithStateInPandas`` as the host: a shard's pointer is a value state of its group.

::

    first micro-batch     initial rows ─▶ version 0 ─┐
    each micro-batch      rows ──────────────────────┴▶ call_shard ─▶ pointer, one timer
                          the shard's timer ─────────▶ call_shard, without rows

Unlike ``applyInPandasWithState`` this operator hands a watermark on to what stands behind it, takes initial state, and
may stand in a query more than once. It needs Spark's RocksDB state store.

Spark knows one timer of a shard, its earliest. Spark takes the timers to fire after all rows, so a timer that a call
for rows sets into the past fires in the same micro-batch. What is still due then is due in the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle, TimerValues, ValueState
from pyspark.sql.types import BinaryType, StructField, StructType

from holdfast.spark_integration.hosts.host import SentRows
from holdfast.spark_integration.hosts.pickled_shards import PickledShards
from holdfast.spark_integration.shard.pointer_row import POINTER_COLUMN, POINTER_VARIABLE, PointerRow
from holdfast.spark_integration.shard.timeout import TimeMode
from holdfast.spark_integration.shard_call.call import ShardStep, call_shard
from holdfast.spark_integration.transport.routes import ROUTE

#: The pointer's column for a worker, which has no JVM to parse text.
POINTER_SCHEMA = StructType([StructField(POINTER_COLUMN, BinaryType())])
_BATCH_MS = "__holdfast_batch_ms"


@dataclass(frozen=True)
class StatefulProcessorHost:
    """The `Host` of steps that may hand on a watermark or begin with initial state."""

    output_mode: str
    time_mode: TimeMode
    event_time_column: str  #: The output column whose times stand behind the watermark; "" for none

    @property
    def drops_late_rows(self) -> bool:
        return self.time_mode == "EventTime"

    def run(self, rows: SentRows, initial: SentRows | None) -> DataFrame:
        frame = _with_batch_time(rows.frame)
        first = None if initial is None else _with_batch_time(initial.frame)
        shards = _Shards(
            _Side(rows.step, frame.columns),
            None if initial is None or first is None else _Side(initial.step, first.columns),
        )
        return frame.groupBy(ROUTE).transformWithStateInPandas(
            PickledShards(shards, POINTER_VARIABLE, POINTER_SCHEMA),
            rows.step.output.sent_schema,
            self.output_mode,
            self.time_mode,
            None if first is None else first.groupBy(ROUTE),
            self.event_time_column,
        )


def _with_batch_time(frame: DataFrame) -> DataFrame:
    # Without a time mode Spark tells a processor no time; it makes this column the time of the micro-batch.
    return frame.withColumn(_BATCH_MS, F.unix_millis(F.current_timestamp()))


@dataclass(frozen=True)
class _Side:
    """Rows or initial rows, as the host shows them."""

    step: ShardStep
    columns: list[str]  #: In the order in which Spark sends them: it renames what is no Python identifier

    def named(self, frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        """Yield frames with the names that the transport gave."""
        return (frame.set_axis(self.columns, axis="columns") for frame in frames)


class _Shards:
    """The `Shards` of a step."""

    def __init__(self, rows: _Side, initial: _Side | None) -> None:
        self._rows = rows
        self._initial = initial

    def open(self, handle: StatefulProcessorHandle, pointer: ValueState) -> None:
        self._handle, self._pointer = handle, pointer
        self._called: set[int] = set()
        self._initial_frames: list[pd.DataFrame] = []
        self._initial_route: int | None = None

    def begin(self, key: Any, frame: pd.DataFrame, times: TimerValues) -> None:
        # Spark hands over a large frame in pieces, and does not say which is the last: each begins anew with all so
        # far. Blobs are few, so pieces are: 64 MiB each.
        assert self._initial is not None
        if self._initial_route != int(key[0]):
            self._initial_route, self._initial_frames = int(key[0]), []
        self._initial_frames += self._initial.named([frame])
        group = _InitialValueOfGroup(self._pointer, self._handle, times, _batch_ms(self._initial_frames[0]))
        for _ in call_shard(self._initial.step, key, self._initial_frames, group):
            pass  # no rows

    def call(self, key: Any, frames: Iterator[pd.DataFrame], times: TimerValues) -> Iterator[pd.DataFrame]:
        named = self._rows.named(frames)
        first = next(named)
        group = ValueOfGroup(self._pointer, self._handle, times, _batch_ms(first))
        yield from call_shard(self._rows.step, key, chain([first], named), group)
        self._called.add(int(key[0]))

    def wake(self, key: Any, times: TimerValues, firing_ms: int) -> Iterator[pd.DataFrame]:
        now_ms = times.getCurrentProcessingTimeInMs()
        group = ValueOfGroup(self._pointer, self._handle, times, now_ms, firing_ms)
        remembered = group.remembered()
        if int(key[0]) in self._called and remembered is not None:
            group.remember(remembered)  # it fired what was due; the rest is due next time
        else:
            yield from call_shard(self._rows.step, key, (), group)


def _batch_ms(frame: pd.DataFrame) -> int:
    return int(frame[_BATCH_MS].iloc[0])


class ValueOfGroup:
    """The `ShardGroup` on Spark's value state and timers.

    `firing_ms` is the timer for which Spark calls, and which it deletes after the call.
    """

    def __init__(
        self,
        pointer: ValueState,
        handle: StatefulProcessorHandle,
        times: TimerValues,
        batch_ms: int,
        firing_ms: int | None = None,
    ) -> None:
        self._pointer = pointer
        self._handle = handle
        self._times = times
        self.batch_ms = batch_ms
        self._firing_ms = firing_ms
        row = pointer.get()
        self._remembered = None if row is None else PointerRow.read(tuple(row))

    @property
    def watermark_ms(self) -> int:
        return self._times.getCurrentWatermarkInMs()

    def remembered(self) -> PointerRow | None:
        return self._remembered

    def remember(self, row: PointerRow) -> None:
        due_ms = row.earliest_timer_ms
        if due_ms is not None and due_ms == self._firing_ms:
            due_ms -= 1  # any time that is past will do, but this one Spark deletes
            row = row._replace(earliest_timer_ms=due_ms)
        was_due_ms = self._remembered.earliest_timer_ms if self._remembered else None
        if was_due_ms not in (None, due_ms, self._firing_ms):
            self._handle.deleteTimer(was_due_ms)
        if due_ms is not None and due_ms != was_due_ms:
            self._handle.registerTimer(due_ms)
        self._pointer.update(row.columns())
        self._remembered = row


class _InitialValueOfGroup(ValueOfGroup):
    """The group of a shard that begins: each piece of the initial state starts it over."""

    def remembered(self) -> PointerRow | None:
        return None
