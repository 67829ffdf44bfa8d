"""Both forms of a stateful example, each on a shard of its own, with clocks set by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from holdfast.spark_integration.processor.exchange import RowExchange
from holdfast.spark_integration.processor.handle import PickledProcessor, declaration_of
from holdfast.spark_integration.processor.transform_with_state import TransformWithState
from holdfast.spark_integration.shard.operator import STATE_TABLE, ShardFunction
from holdfast.spark_integration.shard.timeout import TimeMode
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.vectorised.arrow_with_state import ArrowFunction, ArrowWithState, StateColumns
from holdfast.testing.ddl import parse_schema
from holdfast.testing.embedded_shard import EmbeddedShard

Rows = list[tuple[Any, ...]]


class SideBySide:
    """Runs micro-batches on both forms."""

    def __init__(self, columns: str, output: str) -> None:
        self._columns, self._output = parse_schema(columns), parse_schema(output)
        self._key = StructType([self._columns[0]])
        self._key_types = arrow_schema(self._key, "the keys")
        self._sides: list[tuple[ShardFunction, EmbeddedShard]] = []

    def add_processor(self, processor: StatefulProcessor, time_mode: TimeMode) -> None:
        """Add the form by key."""
        pickled = PickledProcessor(processor)
        function = TransformWithState(
            processor=pickled,
            declared=declaration_of(pickled, time_mode, lambda text, _: parse_schema(text)),
            key_types=self._key_types,
            key_schema=self._key,
            given_keys=[0],
            shown_columns=self._columns.names,
            exchange=RowExchange(self._output, "UTC", 10_000),
            time_mode=time_mode,
            output_mode="append",
            is_streaming=True,
        )
        self._add(function)

    def add_vectorised(
        self, function: ArrowFunction, state: str, time_mode: TimeMode, ttl_ms: int | None = None
    ) -> None:
        """Add the form by shard."""
        states = {STATE_TABLE: StateColumns(arrow_schema(parse_schema(state), "the state"), ttl_ms)}
        output = arrow_schema(self._output, "the output")
        self._add(ArrowWithState(function, self._key_types, output, states, time_mode))

    def _add(self, function: ShardFunction) -> None:
        self._sides.append((function, EmbeddedShard("example", function, self._key_types)))

    def run(self, rows: Sequence[tuple[Any, ...]], now_ms: int = 0) -> Rows:
        """Run a micro-batch at a time on both clocks; return the output, sorted, which is the same of both."""
        schema = arrow_schema(self._columns, "the input")
        given = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
        first, second = (self._run(function, shard, given, now_ms) for function, shard in self._sides)
        assert first == second
        return first

    def _run(self, function: ShardFunction, shard: EmbeddedShard, rows: pa.Table, now_ms: int) -> Rows:
        batches = shard.run(function, rows, rows.select(self._key.names).combine_chunks(), now_ms, now_ms)
        found = [tuple(row[name] for name in self._output.names) for batch in batches for row in batch.to_pylist()]
        return sorted(found, key=repr)

    def stored(self) -> int:
        """Return how many rows both sides hold, of state and of timers."""
        held = 0
        for _, shard in self._sides:
            with shard.begin() as transaction:
                held += sum(len(run) for table in shard.tables for run in transaction.scan(table))
        return held


def on_time(rows: Sequence[tuple[Any, ...]], watermark_ms: int) -> Rows:
    """Return the rows that are not late; their last value is their time."""
    return [row for row in rows if row[-1] > watermark_ms]
