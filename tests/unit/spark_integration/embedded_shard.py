"""A `ShardFunction`, or a vectorised operator, on one embedded shard, with both clocks set by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.arrow import rows as arrow_rows
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.run import Run
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.shard.operator import BatchTimes, ShardFunction, ShardInput
from holdfast.spark_integration.vectorised.arrow_with_state import ArrowWithState, StateColumns, TimeMode
from holdfast.spark_integration.vectorised.batch import ShardBatch


class EmbeddedShard:
    """Runs a function over tables of rows, of which some columns are the keys."""

    #: Few, so that keys which share a hash are usual.
    HASHES = 5

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
        hashes = pa.array([sum(repr(key).encode()) % self.HASHES for key in keys.to_pylist()], pa.int64())
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


KEY_TYPES = pa.schema([("user", pa.string())])
COUNT = pa.schema([("n", pa.int64())])
Step = Callable[[ShardBatch], Any]


class OperatorShard(EmbeddedShard):
    """Runs steps, which tests give one by one, with the state that the steps before have left."""

    def __init__(
        self,
        folder: Path,
        states: Mapping[str, StateColumns],
        time_mode: TimeMode,
        backend: type[Backend] = MemoryBackend,
    ) -> None:
        self._states, self._time_mode = states, time_mode
        super().__init__(folder, self._operator(_nothing), KEY_TYPES.names, backend)

    def _operator(self, step: Step) -> ArrowWithState:
        return ArrowWithState(step, KEY_TYPES, COUNT, self._states, self._time_mode)

    def with_states(self, states: Mapping[str, StateColumns]) -> None:
        """Restart with tables that begin with these: with another time to live, or none, or left out."""
        self._states = states
        self.restart_with(self._operator(_nothing))

    def run(self, users: Sequence[str | None], now: int, step: Step) -> Any:
        """Run a micro-batch with a row for each user, both clocks at `now`; return what the step returned."""
        returned: list[Any] = []
        self.function = self._operator(lambda batch: returned.append(step(batch)))
        self.micro_batch(
            pa.table({"user": pa.array(users, pa.string()), "v": pa.array(range(len(users)), pa.int64())}), now, now
        )
        return returned[0] if returned else None


def users_of(batch: ShardBatch) -> list[str | None]:
    return batch.keys.column("user").to_pylist()


def counts_of(batch: ShardBatch, table: str = "state") -> dict[str | None, int]:
    """Return the column ``n`` of the keys that have state."""
    state = batch.states[table]
    found = zip(users_of(batch), state.get()["n"].to_pylist(), state.exists().to_pylist(), strict=True)
    return {user: n for user, n, exists in found if exists}


def _nothing(batch: ShardBatch) -> None:
    return None


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the rows of each run scanned by prefix, and of each search among equal hashes."""
    read: list[int] = []
    scan_prefix, find_in_crowds = Transaction.scan_prefix, arrow_rows._find_in_crowds

    def counted(*given: Any) -> Iterator[Run]:
        for run in scan_prefix(*given):
            read.append(len(run))
            yield run

    def counted_crowd(*given: Any) -> Any:
        read.append(len(given[-1]))
        return find_in_crowds(*given)

    monkeypatch.setattr(Transaction, "scan_prefix", counted)
    monkeypatch.setattr(arrow_rows, "_find_in_crowds", counted_crowd)
    return read
