"""A week of a cluster at speed: nothing may grow that stays, and no micro-batch may cost more than those before it.

A few hundred micro-batches of a minute in ``make test-all``, a week of them in the long tier.
HOLDFAST_SOAK_BATCHES=100000 divides the week into more, for most of an hour. Shards wander between executors, which are
replaced; queries start and stop, with credentials that change; a scheduled job runs for a moment on an executor of its
own. All that comes at its time, so that a window of samples holds as much of it as the next one; late windows are
compared with early ones. A seed says at which minutes, and which rows are written.

The time is a week to what stays on disk: shards that ended queries leave stay for a seventh of it, in place of a day,
and in a short run a shard that has moved away goes after fewer rounds. Otherwise all would stay through a few hundred
minutes, and what is bounded would look like growth.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.spark_integration.server import housekeeping
from tests.model.built_in import ram_directory
from tests.soak.cluster import TIDY_EVERY_MS, Clock, Executor, Place, Query, Sample
from tests.tiers import LONG

WEEK_MS = 7 * 24 * 60 * 60_000
BATCHES = int(os.environ.get("HOLDFAST_SOAK_BATCHES", WEEK_MS // 60_000 if LONG else 480))
BATCH_MS = min(60_000, WEEK_MS // BATCHES)
EXECUTORS = 3
POLICY = SnapshotPolicy(max_commits=3, interval_seconds=4 * 60 * 60)

WINDOWS = 6
#: Each comes once in so many micro-batches, of which the windows of the shortest run have 80.
EVERY = {"move": 40, "replace": 80, "start": 20, "run job": 20, "rotate": 40}
SHORT_QUERY_BATCHES, JOB_BATCHES = 6, 2
#: How much more a late sample may show than an early one: chance, not growth.
SLACK = 1.35
#: Of a shard on RocksDB in runs: little, so that its rows go into databases again and again.
SHARE_BYTES = 3000


class Cluster:
    """Executors, a query that never ends, queries that do, and a scheduled job."""

    def __init__(self, root: Path, seed: int, backend: str) -> None:
        self.root, self.backend = root, backend
        self.rng = random.Random(seed)
        self.due = {event: self.rng.randrange(every) for event, every in EVERY.items()}
        self.clock = Clock()
        self.place = Place(root / "durable", self.clock)
        self.threads = ThreadPoolExecutor(2)
        self.started = 0
        self.executors = [self._executor() for _ in range(EXECUTORS)]
        self.places, self.at = itertools.cycle(range(EXECUTORS)), dict[tuple[str, int], int]()
        self.lasting = self._query("lasting", 6)
        self.moving = itertools.cycle(range(self.lasting.shards))
        self.job = self._query("job", 2)
        self.job.policy = SnapshotPolicy(max_commits=4)
        self.short: list[Query] = []
        self.tidied_ms = self.clock.ms
        self.queries = self.calls = 0

    def _executor(self) -> Executor:
        self.started += 1
        return Executor(self.root / f"executor-{self.started}-1", self.place, self.clock)

    def _query(self, name: str, shards: int) -> Query:
        self.at |= {(name, shard): next(self.places) for shard in range(shards)}
        return Query(name, shards, self.place, POLICY, retained_versions=8, carried_bytes=400, backend=self.backend)

    def run_batch(self) -> None:
        """Run one micro-batch of the lasting query, and what else happens meanwhile."""
        self.clock.ms += BATCH_MS
        batch = self.lasting.batch_id
        due = {event for event, every in EVERY.items() if batch % every == self.due[event]}
        if "move" in due:
            moved = self.lasting.name, next(self.moving)
            self.at[moved] = (self.at[moved] + 1) % EXECUTORS
        if "rotate" in due:
            self.lasting.token = f"credential-{batch}"
        if "replace" in due:
            self._replace(EXECUTORS - 1)  # the others stay: what they do not let go of is there for ever
        if "start" in due:
            self.queries += 1
            self.short.append(self._query(f"short-{self.queries}", 2))
        self._batch_of(self.lasting, [batch % self.lasting.shards])
        for query in list(self.short):
            self._batch_of(query, range(query.shards))
            if query.batch_id == SHORT_QUERY_BATCHES:
                self._end(query)
        if "run job" in due:
            self._run_job()
        self._drain()
        if self.clock.ms - self.tidied_ms >= TIDY_EVERY_MS:
            self.tidied_ms = self.clock.ms
            for executor in self.executors:
                executor.housekeeping.tidy_up()

    def _batch_of(self, query: Query, shards: Iterable[int]) -> None:
        for shard in shards:
            query.call(shard, self.executors[self.at[query.name, shard]], self.rng, self.threads)
            self.calls += 1
        query.batch_id += 1

    def _replace(self, number: int) -> None:
        self.executors[number].end()
        self.executors[number] = self._executor()

    def _end(self, query: Query) -> None:
        """Stop a query for good; its user deletes what it has stored."""
        self._drain()
        self.short.remove(query)
        assert query.storage is not None
        query.storage.delete([key for key in self.place.stored_ms if key.startswith(f"{query.name}/")])
        query.end()
        self.at = {key: executor for key, executor in self.at.items() if key[0] != query.name}

    def _run_job(self) -> None:
        """Run a scheduled job to its end, on an executor that is there for it alone."""
        executor = self._executor()
        for _ in range(JOB_BATCHES):
            for shard in range(self.job.shards):
                self.job.call(shard, executor, self.rng, self.threads)
                self.calls += 1
            self.job.batch_id += 1
            executor.drain()
            assert executor.failures() == {}
        executor.end()

    def _drain(self) -> None:
        for executor in self.executors:
            executor.drain()
            assert executor.failures() == {}

    def sample(self) -> Sample:
        return Sample.of(self.executors, self.place, self.lasting, self.calls)

    def close(self) -> None:
        for query in (self.lasting, self.job, *self.short):
            query.end()
        for executor in self.executors:
            executor.end()
        self.threads.shutdown()


@pytest.fixture(params=["memory", "rocksdb"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(RocksDBBackend, "share_bytes", lambda _: SHARE_BYTES)
    monkeypatch.setattr(housekeeping, "KEPT_MS", BATCHES * BATCH_MS // 7)
    monkeypatch.setattr(housekeeping, "IDLE_ROUNDS", min(housekeeping.IDLE_ROUNDS, BATCHES // 120))
    with ram_directory() as root:
        made = Cluster(root, seed=7, backend=request.param)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.slow(300 if LONG else 15)
@pytest.mark.all
@pytest.mark.timeout(600 + BATCHES // 2)
def test_nothing_grows_in_a_week(cluster: Cluster) -> None:
    """Local bytes and files, RAM, descriptors, the servers' memory, stored objects, requests for each micro-batch."""
    every = max(1, BATCHES // 60)
    samples: list[list[Sample]] = [[] for _ in range(WINDOWS)]
    for batch in range(BATCHES):
        cluster.run_batch()
        if batch % every == every - 1:
            samples[batch * WINDOWS // BATCHES].append(cluster.sample())
    # The first window fills what is bounded.
    ends = [window[-1] for window in samples]
    asked = [(b.requests - a.requests) / (b.calls - a.calls) for a, b in itertools.pairwise(ends)]
    assert asked[-1] <= SLACK * max(asked[:2]), ("requests for each call", asked)
    for name in asdict(samples[0][0]).keys() - {"requests", "calls", "copies"}:
        means = [sum(getattr(sample, name) for sample in window) / len(window) for window in samples[1:]]
        assert means[-1] <= SLACK * max(means[:2]), (name, means)
    copies = [sample.copies for sample in samples[-1]]
    assert sum(copies) <= 2 * cluster.lasting.shards * len(copies), ("shards that have moved stay", copies)
    cluster.lasting.check(cluster.root, cluster.threads)
    cluster.job.check(cluster.root, cluster.threads)
