"""A vectorised operator on one embedded shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.backends.base import Backend
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.spark_integration.vectorised.arrow_with_state import ArrowWithState, StateColumns, TimeMode
from holdfast.spark_integration.vectorised.batch import ShardBatch
from tests.unit.spark_integration.embedded_shard import EmbeddedShard

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
    """Return the keys of a batch."""
    return batch.keys.column("user").to_pylist()


def counts_of(batch: ShardBatch, table: str = "state") -> dict[str | None, int]:
    """Return the column ``n`` of the keys that have state."""
    state = batch.states[table]
    found = zip(users_of(batch), state.get()["n"].to_pylist(), state.exists().to_pylist(), strict=True)
    return {user: n for user, n, exists in found if exists}


def _nothing(batch: ShardBatch) -> None:
    return None
