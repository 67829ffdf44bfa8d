"""A bench for tests of what goes on for hours."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.snapshotter.snapshots import SnapshotPolicy
from tests.soak.cluster import Clock, Executor, Place, Query


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


HOUR_MS = 60 * 60_000


class Bench:
    """Executors on one state directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()
        self.place = Place(path / "durable", self.clock)
        self.threads = ThreadPoolExecutor(2)
        self.rng = random.Random(1)
        self.executors: list[Executor] = []
        self.queries: list[Query] = []

    def executor(self) -> Executor:
        self.executors.append(Executor(self.path / f"executor-{len(self.executors) + 1}-1", self.place, self.clock))
        return self.executors[-1]

    def query(self, name: str = "one", shards: int = 1, **more: Any) -> Query:
        settings: dict[str, Any] = {"policy": SnapshotPolicy(max_commits=5), "retained_versions": 10}
        self.queries.append(
            Query(name, shards, self.place, **(settings | {"carried_bytes": 0, "backend": "memory"} | more))
        )
        return self.queries[-1]

    def run(
        self, query: Query, executor: Executor, batches: int = 1, *, shards: Any = None, step_ms: int = 1000
    ) -> None:
        """Run micro-batches that call each shard, or some; the server has done its work after each."""
        for _ in range(batches):
            self.clock.ms += step_ms
            for shard in range(query.shards) if shards is None else shards:
                query.call(shard, executor, self.rng, self.threads)
            query.batch_id += 1
            executor.drain()

    def stored(self, folder: str) -> list[str]:
        return sorted(key for key in self.place.stored_ms if f"/{folder}/" in key)

    def end(self, executor: Executor) -> None:
        self.executors.remove(executor)
        executor.end()

    def close(self) -> None:
        for query in self.queries:
            query.end()
        for executor in self.executors:
            executor.end()
        self.threads.shutdown()


def local_shards(executor: Executor) -> set[str]:
    return {path.name.rpartition("-")[0] for path in executor.directory.glob("memory/*/*/shard-*")}


def counters(executor: Executor) -> dict[str, int]:
    return executor.housekeeping.counters | executor.snapshotting.counters
