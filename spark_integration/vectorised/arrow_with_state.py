"""``applyInArrowWithState``: one call of the user's function for all keys of a shard, on Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from holdfast.backends.run import TableSchema
from holdfast.mvcc import Transaction
from holdfast.spark_integration.shard.operator import STATE_TABLE, ShardInput
from holdfast.spark_integration.spark_types import conform_output
from holdfast.spark_integration.vectorised.batch import ShardBatch, ShardState, group_rows

ArrowFunction = Callable[[ShardBatch], "pa.Table | pa.RecordBatch | None"]


@dataclass(frozen=True)
class ArrowWithState:
    """The `ShardFunction` of ``applyInArrowWithState``.

    Attributes
    ----------
    function : callable
    key_types, state_types, output_types : pyarrow.Schema
        In the types that the function sees and returns.
    """

    function: ArrowFunction
    key_types: pa.Schema
    state_types: pa.Schema
    output_types: pa.Schema

    def tables(self) -> Mapping[str, TableSchema]:
        return {STATE_TABLE: TableSchema.of(STATE_TABLE, self.key_types, self.state_types)}

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, None]:
        every_key = batch.keys(self.tables()[STATE_TABLE])
        keys, shown, groups = group_rows(batch.rows, every_key.columns, every_key.hashes, self.key_types)
        returned = self.function(
            ShardBatch(
                rows=batch.rows,
                keys=shown,
                groups=groups,
                state=ShardState(transaction, keys, self.state_types),
                shard=batch.shard,
                batch_id=batch.batch_id,
                watermark_ms=batch.times.watermark_ms,
            )
        )
        if returned is not None:
            yield conform_output(returned, self.output_types, batch.operator)
