"""A `ShardFunction` on one embedded shard, micro-batch after micro-batch, with both clocks set by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast import clock
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.mvcc import VersionedStore
from holdfast.spark_integration.shard.operator import BatchTimes, ShardFunction, ShardInput
from tests.unit.spark_integration.running import ran


class FunctionShard:
    """Runs a function over tables of rows, of which some columns are the keys."""

    def __init__(
        self, folder: Path, function: ShardFunction, keys: list[str], backend_class: type[Backend] = MemoryBackend
    ) -> None:
        self._function, self._keys = function, keys
        self._store = VersionedStore(backend_class(folder, function.tables(), clock.new_id))
        self._pointer: Pointer | None = None
        self._previous_ms: int | None = None
        self.earliest_ms: int | None = None

    def run(self, rows: pa.Table, watermark_ms: int | None = None, processing_ms: int = 0) -> list[dict[str, Any]]:
        """Run a micro-batch; return its output."""
        # A poor hash, so that keys which share one are usual.
        hashes = pa.array([sum(repr(key).encode()) % 3 for key in rows.select(self._keys).to_pylist()], pa.int64())
        times = BatchTimes(processing_ms, watermark_ms, self.earliest_ms, self._previous_ms)
        batch = ShardInput("op", 0, 7, rows, rows.select(self._keys).combine_chunks(), hashes, times)
        with self._store.begin(self._pointer) as transaction:
            output, self.earliest_ms = ran(self._function.run(batch, transaction))
            self._pointer = transaction.commit()
        self._previous_ms = processing_ms
        return output

    def stored(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table."""
        if self._pointer is None:
            return []
        with self._store.read_at(self._pointer) as view:
            runs = list(view.scan(table))
        return [k | v for run in runs for k, v in zip(run.keys.to_pylist(), run.values.to_pylist(), strict=True)]
