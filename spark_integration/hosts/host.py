"""The hosts: the Spark operators that run a step, and their common interface.

A host calls each shard as one of its groups, commits the shard's pointer with the micro-batch, and calls the shard when
a timer is due. holdfast does everything else; above all, it stores the user's state.

=======================  ==============================================================================================
`GroupStateHost`          ``applyInPandasWithState``: runs on any state store; the pointer is the group's state
`StatefulProcessorHost`   ``transformWithStateInPandas``: needs Spark's RocksDB state store, passes on a watermark,
                          takes initial state, and may occur repeatedly in a query; the pointer is a value state
`run_batch`               ``applyInPandas``, for batch queries: state starts empty and ends with the query
=======================  ==============================================================================================

`StatefulProcessorHost`::

    first micro-batch     initial rows ─▶ version 0 ─┐
    each micro-batch      rows ──────────────────────┴▶ call_shard ─▶ pointer, one timer
                          the shard's timer ─────────▶ call_shard, without rows

Spark has only one timer per shard, the earliest. Spark collects due timers after all rows, so a timer that a call with
rows sets in the past fires in the same micro-batch. A timer that is due after that fires in the next micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle, TimerValues, ValueState
from pyspark.sql.types import BinaryType, StructField, StructType

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.errors import InvalidArgumentError
from holdfast.mvcc import Transaction
from holdfast.spark_integration.hosts.pickled_shards import PickledShards
from holdfast.spark_integration.shard.operator import BatchTimes
from holdfast.spark_integration.shard.pointer_row import POINTER_COLUMN, POINTER_STATE, POINTER_VARIABLE, PointerRow
from holdfast.spark_integration.shard.timeout import TimeMode, TimeoutConf, set_shard_timeout
from holdfast.spark_integration.shard_call.call import ShardStep, call_shard
from holdfast.spark_integration.transport.routes import ROUTE

#: The schema of the pointer for a worker, which has no JVM to parse DDL.
POINTER_SCHEMA = StructType([StructField(POINTER_COLUMN, BinaryType())])
_BATCH_MS = "__holdfast_batch_ms"


@dataclass(frozen=True)
class SentRows:
    frame: DataFrame  #: The rows, to be grouped by `ROUTE`
    step: ShardStep  #: The step that the shards run on the rows


class Host(Protocol):
    """A stateful operator of Spark that calls shards."""

    @property
    def drops_late_rows(self) -> bool:
        """Whether the host drops rows that are older than the watermark."""

    def run(self, rows: SentRows, initial: SentRows | None) -> DataFrame:
        """Return the output of all shards, which start from their `initial` rows; called on the driver."""


@dataclass(frozen=True)
class GroupStateHost:
    """The `Host` for steps that pass on no watermark."""

    output_mode: str
    timeout_conf: TimeoutConf

    @property
    def drops_late_rows(self) -> bool:
        return self.timeout_conf == "EventTimeTimeout"

    def run(self, rows: SentRows, initial: SentRows | None) -> DataFrame:
        if initial is not None:
            raise InvalidArgumentError("applyInPandasWithState accepts no initial state")
        step, timeout_conf = rows.step, self.timeout_conf

        def shard(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
            group = StateOfGroup(state, timeout_conf)
            if not group.has_been_called():
                yield from call_shard(step, key, chunks, group)

        return rows.frame.groupBy(ROUTE).applyInPandasWithState(
            shard, step.output.sent_schema, POINTER_STATE, self.output_mode, timeout_conf
        )


class StateOfGroup:
    """The `ShardGroup` on Spark's `GroupState`."""

    def __init__(self, state: GroupState, timeout_conf: TimeoutConf) -> None:
        self._state = state
        self._timeout_conf = timeout_conf
        self._remembered = PointerRow.read(state.get) if state.exists else None

    @property
    def batch_ms(self) -> int:
        return self._state.getCurrentProcessingTimeMs()

    @property
    def watermark_ms(self) -> int:
        return self._state.getCurrentWatermarkMs()

    def has_been_called(self) -> bool:
        """Return whether the shard was already called with rows in this micro-batch, which also fires due timers."""
        remembered = self._remembered
        return self._state.hasTimedOut and remembered is not None and remembered.batch_ms == self.batch_ms

    def remembered(self) -> PointerRow | None:
        return self._remembered

    def remember(self, row: PointerRow) -> None:
        # Always store the pointer: Spark keeps an old timeout if a call updates nothing.
        self._state.update(row.columns())
        set_shard_timeout(self._state, self._timeout_conf, row.earliest_timer_ms)


@dataclass(frozen=True)
class StatefulProcessorHost:
    """The `Host` for steps that may pass on a watermark or start from initial state."""

    output_mode: str
    time_mode: TimeMode
    event_time_column: str  #: The output column that carries the watermark; "" for none

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
    # Without a time mode, a processor gets no time from Spark; this column has the micro-batch's time.
    return frame.withColumn(_BATCH_MS, F.unix_millis(F.current_timestamp()))


@dataclass(frozen=True)
class _Side:
    """Rows or initial rows in the form that Spark passes."""

    step: ShardStep
    columns: list[str]  #: In the order in which Spark sends them; Spark renames columns that are not Python identifiers

    def named(self, frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        """Yield frames with the transport's column names."""
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
        # Spark passes a large frame in pieces and does not mark the last: each call starts over with all pieces so far.
        # Blobs are few, and so are these pieces of 64 MiB.
        assert self._initial is not None
        if self._initial_route != int(key[0]):
            self._initial_route, self._initial_frames = int(key[0]), []
        self._initial_frames += self._initial.named([frame])
        group = _InitialValueOfGroup(self._pointer, self._handle, times, _batch_ms(self._initial_frames[0]))
        for _ in call_shard(self._initial.step, key, self._initial_frames, group):
            pass  # initial state has no output rows

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
            group.remember(remembered)  # its due timers have fired; later ones are due in the next micro-batch
        else:
            yield from call_shard(self._rows.step, key, (), group)


def _batch_ms(frame: pd.DataFrame) -> int:
    return int(frame[_BATCH_MS].iloc[0])


class ValueOfGroup:
    """The `ShardGroup` on Spark's value state and timers; `firing_ms` is the timer that caused the call."""

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
            due_ms -= 1  # any time in the past works, except `firing_ms`, which Spark deletes
            row = row._replace(earliest_timer_ms=due_ms)
        was_due_ms = self._remembered.earliest_timer_ms if self._remembered else None
        if was_due_ms not in (None, due_ms, self._firing_ms):
            self._handle.deleteTimer(was_due_ms)
        if due_ms is not None and due_ms != was_due_ms:
            self._handle.registerTimer(due_ms)
        self._pointer.update(row.columns())
        self._remembered = row


class _InitialValueOfGroup(ValueOfGroup):
    """The group of a shard without a pointer: each piece of the initial state starts over."""

    def remembered(self) -> PointerRow | None:
        return None


def run_batch(rows: SentRows, initial: SentRows | None) -> DataFrame:
    """Return the output of all shards in a batch query."""
    step, groups = rows.step, rows.frame.groupBy(ROUTE)
    schema = step.output.sent_schema
    if initial is None:

        def shard(key: tuple[Any, ...], frame: pd.DataFrame) -> pd.DataFrame:
            return _called(key, [(step, frame)])

        return groups.applyInPandas(shard, schema)
    first = initial.step

    def shard_with_initial(key: tuple[Any, ...], initial_frame: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
        return _called(key, [(first, initial_frame), (step, frame)])

    return initial.frame.groupBy(ROUTE).cogroup(groups).applyInPandas(shard_with_initial, schema)


def _called(key: tuple[Any, ...], parts: list[tuple[ShardStep, pd.DataFrame]]) -> pd.DataFrame:
    """Run a shard's steps in order on the same state."""
    step = parts[-1][0]
    transaction = Transaction(None, 1, None, step.operator.function.tables(), _keep_nothing)
    batches = list(_outputs(key, parts, transaction))
    # In one batch: the worker cannot convert Arrow-backed columns that pandas has concatenated.
    frames = list(step.output.send([pa.concat_batches(batches)] if batches else []))
    return pd.concat(frames) if frames else pd.DataFrame()


def _outputs(
    key: tuple[Any, ...], parts: list[tuple[ShardStep, pd.DataFrame]], transaction: Transaction
) -> Iterator[pa.RecordBatch]:
    # Ignore the task's properties: a batch query inside foreachBatch inherits the streaming query's.
    now_ms, earliest_timer_ms = clock.now_ms(), None
    for step, frame in parts:
        # Initial state has a separate version, as in a stream: list elements are numbered by version.
        transaction.version = step.operator.first_version
        times = BatchTimes(now_ms, None, earliest_timer_ms, None)
        batch = step.operator.input_of(step.received([frame]), step.shard_of(key), None, times)
        earliest_timer_ms = yield from step.operator.function.run(batch, transaction)


def _keep_nothing(transaction: Transaction, runs: object) -> Pointer:
    raise AssertionError("a batch query has no state to commit")
