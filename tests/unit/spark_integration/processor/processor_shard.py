"""A processor on one embedded shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import DataType, StringType, StructField, StructType

from holdfast.backends.base import Backend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.spark_integration.keyed.frames import FrameFormat
from holdfast.spark_integration.processor.exchange import FrameExchange, RowExchange
from holdfast.spark_integration.processor.handle import PickledProcessor, declaration_of
from holdfast.spark_integration.processor.transform_with_state import TransformWithState
from holdfast.spark_integration.shard.timeout import TimeMode
from tests.unit.spark_integration.embedded_shard import EmbeddedShard


def columns(**types: DataType) -> StructType:
    """Return a schema; a worker cannot parse one from text."""
    return StructType([StructField(name, data_type) for name, data_type in types.items()])


KEY = StructType([StructField("key", StringType())])
OUTPUT = StructType([*KEY, StructField("shown", StringType())])


class Scripted(StatefulProcessor):
    """Declares what `declare` declares, and does with it what a test says, by functions of (states, key, handle)."""

    #: What the calls of this process do; a processor is pickled, and these must not be.
    rows: Callable[..., Any]
    expired: Callable[..., Any]
    #: What a test lets change from one making of the processor to the next.
    turns: Iterator[Any]

    def __init__(self, declare: Callable[[StatefulProcessorHandle], Any]) -> None:
        self.declare = declare

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.states = self.declare(handle)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        seen = Scripted.rows(self.states, key, self.handle)
        return iter([Row(key=str(key[0]), shown=repr(seen))])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        due_ms = expiredTimerInfo.getExpiryTimeInMs()
        seen = Scripted.expired(self.states, key, self.handle, due_ms)
        return iter([Row(key=f"{key[0]}@{due_ms}", shown=repr(seen))])


class ProcessorShard(EmbeddedShard):
    """Runs a processor; what it does is given micro-batch by micro-batch, or it is any processor."""

    def __init__(
        self,
        folder: Path,
        processor: StatefulProcessor,
        time_mode: TimeMode = "None",
        *,
        output: StructType = OUTPUT,
        in_pandas: bool = False,
        backend: type[Backend] = MemoryBackend,
    ) -> None:
        self.time_mode, self._output, self._in_pandas = time_mode, output, in_pandas
        super().__init__(folder, self._step(processor), KEY.names, backend)

    def _step(self, processor: StatefulProcessor) -> TransformWithState:
        pickled = PickledProcessor(processor)
        exchange: RowExchange | FrameExchange = RowExchange(self._output, "UTC", 10_000)
        if self._in_pandas:
            exchange = FrameExchange(self._output, FrameFormat("UTC"), 10_000)
        return TransformWithState(
            processor=pickled,
            declared=declaration_of(pickled, self.time_mode),
            key_types=pa.schema([("key", pa.string())]),
            key_schema=KEY,
            given_keys=[0],
            shown_columns=["key", "v"],
            exchange=exchange,
            time_mode=self.time_mode,
            output_mode="update",
            is_streaming=True,
        )

    def restart(self, processor: StatefulProcessor) -> None:
        """Go on with another processor, whose tables hold nothing that those of the first do not."""
        self.restart_with(self._step(processor))

    def run(self, keys: Sequence[str | None], now: int = 0) -> list[dict[str, Any]]:
        """Run a micro-batch with a row for each key, both clocks at `now`; return the output."""
        rows = pa.table({"key": pa.array(keys, pa.string()), "v": pa.array(range(len(keys)), pa.int64())})
        return self.micro_batch(rows, now, now)

    def each(self, keys: Sequence[str | None], does: Callable[..., Any], now: int = 0) -> dict[str, Any]:
        """Run a micro-batch in which `does` is called for each key; return what it returned, by key."""
        Scripted.rows = does  # type: ignore[assignment]
        return {row["key"]: row["shown"] for row in self.run(keys, now)}
