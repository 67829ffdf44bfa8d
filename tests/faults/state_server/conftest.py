"""Executors, which are child processes that wait, and their shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.clock import new_id
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.messages import Committed, ShardAddress
from holdfast.testing.state_rows import COUNTS, contents, keys_of, values_of
from tests.faults.executor_process import Executor, StartExecutor


@pytest.fixture
def executor(executors: StartExecutor) -> Executor:
    return executors()


@pytest.fixture
def shards() -> Iterator[Callable[..., Shard]]:
    made: list[Shard] = []

    def make(*arguments: Any, **more: Any) -> Shard:
        made.append(Shard(*arguments, **more))
        return made[-1]

    yield make
    for shard in made:
        shard.threads.shutdown()


PREFIX = "totals/shard-0000"


SECRET = "sEcReT-42"


class Shard:
    """A shard of an executor; a commit is announced as `announce` does it."""

    def __init__(self, executor: Executor, client: StateClient, state_dir: str | None = None, **more: Any) -> None:
        self.directory = executor.directory / "query" / "totals" / "shard-0000"
        self.client = client
        self.tables = {"counts": COUNTS}
        self.backend = MemoryBackend(self.directory, self.tables, new_id)
        self.threads = ThreadPoolExecutor(2)
        log = None
        if state_dir is not None:
            log = ObjectCommitLog(open_storage(state_dir), PREFIX, self.tables, self.threads, self.directory, "memory")
        self.store = VersionedStore(self.backend, log)
        self.state_dir = state_dir
        self.pointer: Pointer | None = None
        self.more = {"storage_options": {}, "policy": SnapshotPolicy(max_commits=3), "retained_versions": 100, **more}

    def commit(self, first: int, count: int = 1) -> Committed:
        """Commit users first … first + count and return the announcement."""
        accepted = self.pointer
        users = [(f"u{i}",) for i in range(first, first + count)]
        with self.store.begin(accepted) as transaction:
            transaction.put("counts", keys_of(COUNTS, users), values_of(COUNTS, [(first,)] * count))
            self.pointer = transaction.commit()
        return Committed(
            shard=ShardAddress.of(self.directory, "memory", {}, self.tables),
            accepted=accepted,
            committed=self.pointer,
            prefix=PREFIX,
            state_dir=self.state_dir,
            **self.more,
        )

    def announce(self, message: Committed) -> None:
        self.client.call("committed", message.encode())

    def state(self) -> dict[Any, Any]:
        assert self.pointer is not None
        with self.store.read_at(self.pointer) as view:
            return {key[0]: value[0] for key, value in contents(view, "counts").items()}


def counters(client: StateClient) -> dict[str, int]:
    assert client.call("drain", b'{"timeout_seconds": 20.0}', 25.0) is True
    found: dict[str, int] = client.call("statistics")["counters"]
    return found


def defined(**settings: Any) -> Any:
    """An operator's definition, as workers have it."""
    from holdfast.settings import Settings
    from holdfast.spark_integration.shard.operator import Operator
    from holdfast.spark_integration.vectorised.arrow_with_state import ArrowWithState, StateColumns

    types = pa.schema([("user", pa.string())])
    return Operator(
        name="totals",
        definition_id="def",
        function=ArrowWithState(lambda _: None, types, types, {"state": StateColumns(types, None)}, "None"),
        shards=1,
        key_columns=["user"],
        row_columns=["user"],
        key_names=["user"],
        watermark=None,
        settings=Settings(**settings),
    )
