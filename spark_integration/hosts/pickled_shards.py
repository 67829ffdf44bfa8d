"""The processor that Spark gets; the code that calls shards stays pickled until the first call.

At the start of each query Spark unpickles its processor in a process of its own, calls `init`, and ends it. What calls
shards needs pandas, pyarrow and most of holdfast: to import them there would take half a second of CPU time. So this
module imports nothing but what that process already has.
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
    """Calls the shards of one partition; each is a Spark group."""

    def open(self, handle: StatefulProcessorHandle, pointer: ValueState) -> None:
        """Begin, in a worker."""

    def begin(self, key: Any, frame: Any, times: TimerValues) -> None:
        """Take a piece of a shard's initial state."""

    def call(self, key: Any, frames: Iterator[Any], times: TimerValues) -> Iterator[Any]:
        """Call a shard with rows; yield frames."""

    def wake(self, key: Any, times: TimerValues, firing_ms: int) -> Iterator[Any]:
        """Call a shard whose timer fires."""


class PickledShards(ImmediateAcks, StatefulProcessor):
    """Unpickles the shards at the first call of each micro-batch; `variable` keeps a shard's pointer."""

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
