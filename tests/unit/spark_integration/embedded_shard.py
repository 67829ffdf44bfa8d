"""A `ShardFunction` on one embedded shard, micro-batch after micro-batch, with both clocks set by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast import clock
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.shard.operator import BatchTimes, ShardFunction, ShardInput


class EmbeddedShard:
    """Runs a function over tables of rows, of which some columns are the keys."""

    def __init__(
        self, folder: Path, function: ShardFunction, keys: Sequence[str], backend: type[Backend] = MemoryBackend
    ) -> None:
        self.function, self._keys = function, list(keys)
        self.backend = backend(folder, function.tables(), clock.new_id)
        self.store = VersionedStore(self.backend)
        self._tables = StoredTables.of_first_run(function.tables())
        self.pointer: Pointer | None = None
        self._previous_ms: int | None = None
        self.earliest_ms: int | None = None

    def restart_with(self, function: ShardFunction) -> None:
        """Go on with another function, whose tables hold nothing that those of the first do not."""
        self.function = function
        self._tables = self._tables.with_declared(function.tables())
        self.store = VersionedStore(self.backend, None, self._tables.declared, self._tables.names)

    def micro_batch(
        self, rows: pa.Table, watermark_ms: int | None = None, processing_ms: int = 0
    ) -> list[dict[str, Any]]:
        """Run a micro-batch; return its output."""
        keys = rows.select(self._keys).combine_chunks()
        # A poor hash, so that keys which share one are usual.
        hashes = pa.array([sum(repr(key).encode()) % 5 for key in keys.to_pylist()], pa.int64())
        times = BatchTimes(processing_ms, watermark_ms, self.earliest_ms, self._previous_ms)
        output: list[dict[str, Any]] = []
        with self.store.begin(self.pointer) as transaction:
            if self.pointer is not None:
                self.store.prune(self.pointer)
            running = self.function.run(ShardInput("op", 0, 0, rows, keys, hashes, times), transaction)
            while True:
                try:
                    output += next(running).to_pylist()
                except StopIteration as end:
                    self.earliest_ms = end.value
                    break
            self.pointer = transaction.commit()
        self._previous_ms = processing_ms
        return output

    def maintain(self) -> None:
        """Do what the state server does in the background."""
        if self.pointer is not None:
            self.backend.maintain(self.pointer)

    def stored(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table as they are stored."""
        if self.pointer is None:
            return []
        with self.store.read_at(self.pointer) as view:
            runs = list(view.scan(table))
        return [k | v for run in runs for k, v in zip(run.keys.to_pylist(), run.values.to_pylist(), strict=True)]


class FunctionShard(EmbeddedShard):
    """Runs a function over tables of rows, of which some columns are the keys."""

    run = EmbeddedShard.micro_batch
