"""A vectorised operator on one embedded shard, micro-batch after micro-batch, with both clocks set by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast import clock
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.spark_integration.shard.operator import BatchTimes, ShardInput
from holdfast.spark_integration.vectorised.arrow_with_state import ArrowWithState, StateColumns, TimeMode
from holdfast.spark_integration.vectorised.batch import ShardBatch

KEY_TYPES = pa.schema([("user", pa.string())])
COUNT = pa.schema([("n", pa.int64())])
Step = Callable[[ShardBatch], Any]


class OperatorShard:
    """Runs steps, which tests give one by one, with the state that the steps before have left."""

    def __init__(
        self,
        folder: Path,
        states: Mapping[str, StateColumns],
        time_mode: TimeMode,
        backend_class: type[Backend] = MemoryBackend,
    ) -> None:
        self._states, self._time_mode = states, time_mode
        self.backend = backend_class(folder, self._operator(_nothing).tables(), clock.new_id)
        self._store = VersionedStore(self.backend)
        self._tables = StoredTables.of_first_run(self._operator(_nothing).tables())
        self._pointer: Pointer | None = None
        self._previous_ms: int | None = None
        self.earliest_ms: int | None = None

    def _operator(self, step: Step) -> ArrowWithState:
        return ArrowWithState(step, KEY_TYPES, COUNT, self._states, self._time_mode)

    def with_states(self, states: Mapping[str, StateColumns]) -> None:
        """Restart with tables that begin with these: with another time to live, or none, or left out."""
        self._states = states
        self._tables = self._tables.with_declared(self._operator(_nothing).tables())
        self._store = VersionedStore(self.backend, None, self._tables.declared, self._tables.names)

    def run(self, users: Sequence[str | None], now: int, step: Step) -> Any:
        """Run a micro-batch with a row for each user, both clocks at `now`; return what the step returned."""
        rows = pa.table({"user": pa.array(users, pa.string()), "v": pa.array(range(len(users)), pa.int64())})
        # A poor hash, so that keys which share one are usual.
        hashes = pa.array([sum(repr(user).encode()) % 3 for user in users], pa.int64())
        times = BatchTimes(now, now, self.earliest_ms, self._previous_ms)
        batch = ShardInput("op", 0, 7, rows, rows.select(["user"]), hashes, times)
        returned: list[Any] = []
        with self._store.begin(self._pointer) as transaction:
            if self._pointer is not None:
                self._store.prune(self._pointer)
            running = self._operator(lambda batch: returned.append(step(batch))).run(batch, transaction)
            while True:
                try:
                    next(running)
                except StopIteration as end:
                    self.earliest_ms = end.value
                    break
            self._pointer = transaction.commit()
        self._previous_ms = now
        return returned[0] if returned else None

    def maintain(self) -> None:
        """Do what the state server does in the background."""
        if self._pointer is not None:
            self.backend.maintain(self._pointer)

    def stored(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table as they are stored."""
        if self._pointer is None:
            return []
        with self._store.read_at(self._pointer) as view:
            runs = list(view.scan(table))
        return [k | v for run in runs for k, v in zip(run.keys.to_pylist(), run.values.to_pylist(), strict=True)]


def users_of(batch: ShardBatch) -> list[str | None]:
    """Return the keys of a batch."""
    return batch.keys.column("user").to_pylist()


def counts_of(batch: ShardBatch, table: str = "state") -> dict[str | None, int]:
    """Return the column ``n`` of the keys that have state."""
    state = batch.states[table]
    found = zip(users_of(batch), state.get()["n"].to_pylist(), state.exists().to_pylist(), strict=True)
    return {user: n for user, n, exists in found if exists}


def _nothing(batch: ShardBatch) -> None:
    return None
