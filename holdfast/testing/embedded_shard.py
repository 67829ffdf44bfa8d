"""A shard in this process: runs a `ShardFunction` on its state, one micro-batch after another, without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import xxhash

from holdfast.backends.arrow.rows import HashArray
from holdfast.backends.base import Pointer
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs
from holdfast.backends.run_files.view import RunFilesView
from holdfast.mvcc import Transaction
from holdfast.spark_integration.shard.operator import BatchTimes, ShardFunction, ShardInput


class EmbeddedShard:
    """A shard's newest version and its earliest timer; a failed call changes nothing."""

    def __init__(self, operator: str, function: ShardFunction, key_types: pa.Schema) -> None:
        self._operator = operator
        self.tables = function.tables()
        self._keys = TableSchema.of("grouping keys", key_types, pa.schema([]))
        self._runs: dict[str, Run] = {}
        self._version = 0
        self._previous_ms: int | None = None
        self.earliest_timer_ms: int | None = None

    def run(
        self,
        function: ShardFunction,
        rows: pa.Table,
        shown_keys: pa.Table,
        processing_ms: int,
        watermark_ms: int | None,
    ) -> list[pa.RecordBatch]:
        """Run one micro-batch, and return its output. `shown_keys`: the key of each row."""
        batch = ShardInput(
            operator=self._operator,
            shard=0,
            batch_id=self._version,
            rows=rows,
            shown_keys=shown_keys,
            hashes=pa.array(self._hashes(shown_keys).view(np.int64)),
            times=self.times(processing_ms, watermark_ms),
        )
        earliest_timer_ms: int | None = None

        def output(transaction: Transaction) -> Iterator[pa.RecordBatch]:
            nonlocal earliest_timer_ms
            earliest_timer_ms = yield from function.run(batch, transaction)

        with self.begin() as transaction:
            batches = list(output(transaction))
            transaction.commit()
        self.earliest_timer_ms, self._previous_ms = earliest_timer_ms, processing_ms
        return batches

    def begin(self) -> Transaction:
        """Begin a transaction on the shard's newest version."""
        pointer = Pointer(self._version, "tested")
        view = RunFilesView(pointer, self.tables, {name: [run] for name, run in self._runs.items()}, {})
        return Transaction(pointer, self._version + 1, view, self.tables, self._commit)

    def times(self, processing_ms: int, watermark_ms: int | None) -> BatchTimes:
        """Return the times of a micro-batch."""
        return BatchTimes(processing_ms, watermark_ms, self.earliest_timer_ms, self._previous_ms)

    def keys_of(self, shown: pa.Table) -> Keys:
        """Return keys for look-ups."""
        return Keys.of(self._keys, self._hashes(shown), shown)

    def _hashes(self, shown: pa.Table) -> HashArray:
        """Return a hash per key; not Spark's, but equal for equal keys."""
        normal = Keys.of(self._keys, np.zeros(len(shown), np.uint64), shown).columns
        texts = map(repr, zip(*(column.to_pylist() for column in normal.columns), strict=True))
        return np.array([xxhash.xxh3_64_intdigest(text.encode()) for text in texts], np.uint64)

    def _commit(self, transaction: Transaction, runs: Mapping[str, Run]) -> Pointer:
        for name, run in runs.items():
            before = [self._runs[name]] if name in self._runs else []
            self._runs[name] = merge_runs([*before, run], drop_deletes=True)
        self._version += 1
        return Pointer(self._version, "tested")
