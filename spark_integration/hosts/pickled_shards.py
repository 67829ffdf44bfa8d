"""A processor for Spark that keeps the code that calls shards pickled until the first call.

At the start of each query, Spark unpickles the processor in a separate process, calls `init` and ends the process. The
code that calls shards needs pandas, pyarrow and most of holdfast, whose import would cost that process half a second of
CPU time. So this module imports only modules that the process has already loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from pyspark import cloudpickle
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
    ValueState,
)
from pyspark.sql.types import StructType

from holdfast.spark_integration.transport.python_stage import ImmediateAcks


class Shards(Protocol):
    """Calls the shards of one partition; each shard is a Spark group."""

    def open(self, handle: StatefulProcessorHandle, pointer: ValueState) -> None:
        """Start a micro-batch in a worker."""

    def begin(self, key: Any, frame: Any, times: TimerValues) -> None:
        """Store a piece of a shard's initial state."""

    def call(self, key: Any, frames: Iterator[Any], times: TimerValues) -> Iterator[Any]:
        """Call a shard with rows; yield output frames."""

    def wake(self, key: Any, times: TimerValues, firing_ms: int) -> Iterator[Any]:
        """Call a shard whose timer has fired."""


class PickledShards(ImmediateAcks, StatefulProcessor):
    """Unpickles the shards at the first call of each micro-batch; the value state `variable` stores each pointer."""

    def __init__(self, shards: Shards, variable: str, schema: StructType) -> None:
        self._pickled: bytes = cloudpickle.dumps(shards)  # type: ignore[no-untyped-call]
        self._variable, self._schema = variable, schema

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle, self._pointer = handle, handle.getValueState(self._variable, self._schema)
        self._opened: Shards | None = None

    def _shards(self) -> Shards:
        if self._opened is None:
            opened: Shards = cloudpickle.loads(self._pickled)
            opened.open(self._handle, self._pointer)
            self._opened = opened
        return self._opened

    def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:
        self._shards().begin(key, initialState, timerValues)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:
        return self._shards().call(key, rows, timerValues)

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Any]:
        return self._shards().wake(key, timerValues, expiredTimerInfo.getExpiryTimeInMs())
