"""What the state server does for a shard in the long run, with its real components on a clock that the test turns:
slow uploads, failures that repeat, jobs that run for a moment, queries that go back, shards that move away.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends import local_files, stored_file
from holdfast.errors import NotFoundError
from holdfast.snapshotter.snapshots.policy import SnapshotPolicy
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.snapshotter.upkeep.troubles import read_trouble
from holdfast.spark_integration.client.messages import Committed, ShardAddress
from holdfast.spark_integration.server import snapshotting as snapshotting_module
from holdfast.spark_integration.server.shard_use import IDLE_ROUNDS, SILENT_MS, ShardUse
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.soak.cluster import Clock, ClockedStorage, Executor, Place, Query

HOUR_MS = 60 * 60_000


class Bench:
    """Executors on one checkpoint directory."""

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
        self.queries.append(Query(name, shards, self.place, **(settings | {"carried_bytes": 0} | more)))
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


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def local_shards(executor: Executor) -> set[str]:
    return {path.name.rpartition("-")[0] for path in executor.directory.glob("memory/*/*/shard-*")}


def counters(executor: Executor) -> dict[str, int]:
    return executor.housekeeping.counters | executor.snapshotting.counters


# Uploads that take long


def test_an_upload_may_take_as_long_as_it_wants(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store, a large shard, a small bandwidth: the sweep of leftovers runs meanwhile, again and again."""
    executor, query = bench.executor(), bench.query()
    put, swept = ClockedStorage.put, []

    def slow_put(storage: ClockedStorage, key: str, data: Any) -> None:
        if "/files/" in key:
            bench.clock.ms += 12 * HOUR_MS
            _age(executor.directory)
            swept.extend(_sweep(home) for home in executor.directory.glob("memory/*/*/shard-*"))
        put(storage, key, data)

    monkeypatch.setattr(ClockedStorage, "put", slow_put)
    bench.run(query, executor, 20)
    assert counters(executor)["snapshot_errors"] == counters(executor)["snapshots_missed"] == 0
    assert counters(executor)["snapshots"] == 4
    assert len(bench.stored("snapshots")) == 4
    assert len(swept) > 4
    assert set(swept) == {0}


def _sweep(home: Path) -> int:
    return local_files.remove_stale_folders(home / "uploading", 2**63 - 1)


def _age(folder: Path) -> None:
    for path in folder.rglob("uploading/*"):
        os.utime(path, (1, 1))


def test_what_vanishes_during_an_upload_is_a_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken for a version that the query has left behind: neither counted nor told, and sent for ever."""
    executor, query = bench.executor(), bench.query()
    monkeypatch.setattr(
        "holdfast.snapshotter.snapshots.snapshots.upload_files", _raise(NotFoundError("files/x is not there"))
    )
    with caplog.at_level(logging.WARNING):
        bench.run(query, executor, 6)
    assert counters(executor)["snapshot_errors"] >= 1
    assert counters(executor)["snapshots_missed"] == 0
    assert "files/x is not there" in str(executor.snapshotting.errors())
    assert "snapshot of one/shard-0000 has failed, 1 in a row: files of a snapshot vanished" in caplog.text


def _raise(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


# Failures that repeat


def failing(bench: Bench, monkeypatch: pytest.MonkeyPatch, *faults: Fault) -> None:
    """Let the storage fail for the servers that are started from now on."""
    monkeypatch.setattr(
        bench.place, "open", lambda url, _: FaultyStorage(Place.open(bench.place, url, {}), list(faults))
    )


def test_failures_are_told_in_durable_storage_until_they_are_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everybody who looks there sees what fails, how often in a row and why; there is one object, however often."""
    query = bench.query()
    query.storage = bench.place.open(str(bench.place.path), {})
    failing(bench, monkeypatch, Fault("fail", action="put", key="*/files/*", nth=1, times=12))
    executor = bench.executor()
    bench.run(query, executor, 8, step_ms=10 * 60_000)
    assert counters(executor)["snapshot_errors"] == 4
    (key,), shard = bench.stored("troubles"), PrefixedStorage(query.storage, "one/shard-0000")
    trouble = read_trouble(shard, key.split("/", 2)[2])
    assert (trouble.what, trouble.in_a_row, trouble.error) == ("snapshot", 4, "injected fault")
    assert "4 in a row: injected fault" in caplog.text
    bench.run(query, executor, 12, step_ms=10 * 60_000)
    assert counters(executor)["snapshots"] >= 1
    assert list_shard(shard).troubles == [], "it is out of date"


def test_a_storage_that_takes_nothing_is_told_by_the_log(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    query = bench.query()
    query.storage = bench.place.open(str(bench.place.path), {})
    failing(bench, monkeypatch, Fault("fail", nth=1, times=None))
    executor = bench.executor()
    bench.run(query, executor, 6)
    assert "nor can" in caplog.text
    assert executor.snapshotting.errors()


def test_versions_that_are_always_gone_too_soon_become_a_failure(bench: Bench) -> None:
    """One that the query has dropped is nothing; if that goes on for ever there is no snapshot, and that must show."""
    executor, query = bench.executor(), bench.query()
    bench.run(query, executor, 4)
    (message,) = executor.housekeeping._known.values()
    gone = message.__class__(**{**vars(message), "committed": message.committed._replace(commit_id="gone")})
    for _ in range(snapshotting_module.MISSED_IS_FAILURE):
        assert counters(executor)["snapshot_errors"] == 0
        executor.snapshotting.announce(gone)
        executor.drain()
    assert counters(executor)["snapshots_missed"] == snapshotting_module.MISSED_IS_FAILURE
    assert counters(executor)["snapshot_errors"] == 1


def test_attempts_that_fail_are_cleaned_up_after(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt sends parts under new ids; no snapshot comes before which that would go."""
    query = bench.query(policy=SnapshotPolicy(max_commits=1), retained_versions=1)
    query.storage = bench.place.open(str(bench.place.path), {})
    failing(bench, monkeypatch, Fault("fail", action="put", key="*/snapshots/*", nth=1, times=None))
    executor = bench.executor()
    bench.run(query, executor, 60, step_ms=20 * 60_000)
    assert counters(executor)["snapshots"] == 0
    assert counters(executor)["clean_ups"] >= 10
    assert len(bench.stored("files")) < 30, "of 120"


# Notes


def test_after_the_query_was_set_back_its_snapshots_count(bench: Bench) -> None:
    """Notes were kept by version number: each new one was deleted at once, and every commit sent all of the shard."""
    executor, query = bench.executor(), bench.query(retained_versions=100)
    bench.run(query, executor, 20)
    at_20, state_20 = query.rows[0], dict(query.state[0])
    bench.run(query, executor, 40)
    before = counters(executor)["snapshots"]
    query.rows[0], query.state[0], query.batch_id = at_20, state_20, 20
    bench.run(query, executor, 15)
    assert counters(executor)["snapshots"] - before == 3
    notes = list(executor.directory.glob("memory/*/*/shard-*/snapshots/*"))
    assert len(notes) == 4
    query.check(bench.path, bench.threads)


# Intervals


@pytest.mark.parametrize("carried_bytes", [0, 16_384])
def test_an_interval_without_a_write_writes_no_snapshot(bench: Bench, carried_bytes: int) -> None:
    """Also where the version's commit was carried, and so is not replaced by the snapshot in its lineage."""
    query = bench.query(policy=SnapshotPolicy(max_commits=1000, interval_seconds=60), carried_bytes=carried_bytes)
    executor = bench.executor()
    bench.run(query, executor, 3, step_ms=30_000)
    (message,) = executor.housekeeping._known.values()
    for _ in range(20):
        bench.clock.ms += 61_000
        executor.announce(message)
        executor.drain()
    assert len(bench.stored("snapshots")) == 1
    bench.run(query, executor, 1, step_ms=61_000)
    assert len(bench.stored("snapshots")) == 2


def test_an_interval_goes_on_in_the_next_process(bench: Bench) -> None:
    """A job that runs for a minute an hour has a snapshot each two hours, if that is what was asked for."""
    query = bench.query(policy=SnapshotPolicy(max_commits=6, interval_seconds=2 * 3600))
    executor = bench.executor()
    bench.run(query, executor, 7)
    bench.end(executor)
    for written in (1, 1, 2, 2, 3):
        executor = bench.executor()
        bench.run(query, executor, 1)
        bench.end(executor)
        bench.clock.ms += HOUR_MS + 60_000
        assert len(bench.stored("snapshots")) == written


# Clean-ups


@pytest.mark.slow
def test_a_scheduled_job_stores_no_more_than_a_running_one(tmp_path: Path) -> None:
    """Six applications of 60 micro-batches, each with a server of its own, against one of 360."""
    objects, asked = [], []
    for lives in (6, 1):
        bench = Bench(tmp_path / str(lives))
        query = bench.query(policy=SnapshotPolicy(max_commits=20), retained_versions=100)
        for _ in range(lives):
            executor = bench.executor()
            bench.run(query, executor, 360 // lives, step_ms=2 * 60_000)
            assert executor.failures() == {}
            bench.end(executor)
        query.check(tmp_path, bench.threads)
        objects.append(len(bench.place.stored_ms))
        asked.append(bench.place.requests)
        bench.close()
    assert objects[0] - 5 <= objects[1] < 260
    # Each life restores, and does not know yet what former ones have read.
    assert asked[0].total() < asked[1].total() + 6 * 60


def test_a_job_of_one_micro_batch_uses_the_snapshots_of_the_one_before(bench: Bench) -> None:
    """A snapshot after the last commit of an application is in no commit: the next ones wrote the whole shard again."""
    query = bench.query()
    written = cleaned = 0
    for _ in range(60):
        executor = bench.executor()
        bench.run(query, executor, step_ms=HOUR_MS)
        written += counters(executor)["snapshots"]
        cleaned += counters(executor)["clean_ups"]
        assert executor.failures() == {}
        bench.end(executor)
    assert 10 <= written <= 14
    assert cleaned >= 2
    query.check(bench.path, bench.threads)


def test_a_query_that_is_faster_than_its_uploads_is_cleaned_up_after(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that it had accepted was always gone when the clean-up asked for it."""
    query, executor = bench.query(retained_versions=5), bench.executor()
    put = ClockedStorage.put
    nested = itertools.count()

    def put_while_the_query_goes_on(storage: ClockedStorage, key: str, data: Any) -> None:
        put(storage, key, data)
        if "/files/" in key and next(nested) < 10_000:
            for path in executor.directory.glob("memory/*/*/shard-*/versions"):
                versions = sorted(path.iterdir(), key=lambda p: int(p.name.partition("-")[0]))
                for old in versions[:-1]:
                    old.rename(executor.directory / f"gone-{next(nested)}")

    monkeypatch.setattr(ClockedStorage, "put", put_while_the_query_goes_on)
    bench.run(query, executor, 60, step_ms=10 * 60_000)
    assert counters(executor)["clean_ups"] >= 2
    assert executor.failures() == {}


def test_a_stray_object_does_not_stop_clean_ups_after_the_query_went_back(bench: Bench) -> None:
    """What a late attempt stores below all that was cleaned up made history look torn."""
    query, executor = bench.query(retained_versions=20), bench.executor()
    bench.run(query, executor, 60, step_ms=10 * 60_000)
    at_60, state_60 = query.rows[0], dict(query.state[0])
    bench.run(query, executor, 20, step_ms=10 * 60_000)
    assert counters(executor)["deleted_objects"] > 20
    assert query.storage is not None
    header = {"rows": {}, "plain_bytes": {}, "chain": [], "last": None, "pointer": "3-dead", "since": ["3-dead"]}
    commit, _ = stored_file.encode("commit", header | {"shard": "one/shard-0000"})
    query.storage.put("one/shard-0000/commits/3-dead", commit)
    query.rows[0], query.state[0], query.batch_id = at_60, state_60, 60
    query.retained_versions = 60  # all that is there, and more
    bench.run(query, executor, 30, step_ms=1000)
    assert executor.failures() == {}
    query.retained_versions = 20
    bench.run(query, executor, 40, step_ms=10 * 60_000)
    assert executor.failures() == {}
    assert "one/shard-0000/commits/3-dead" not in bench.place.stored_ms
    query.check(bench.path, bench.threads)


# Shards that are not here any more


def test_a_shard_that_moved_away_is_let_go(bench: Bench) -> None:
    """And is restored when it comes back; what stays of it is nothing, on disk or in memory."""
    one, other, query = bench.executor(), bench.executor(), bench.query(shards=3)
    bench.run(query, one, 3)
    for _ in range(IDLE_ROUNDS * 2):
        bench.run(query, other, shards=[2])
        query.batch_id -= 1
        bench.run(query, one, shards=[0, 1])
    assert local_shards(one) == {"shard-0000", "shard-0001"}
    assert local_shards(other) == {"shard-0002"}
    assert counters(one)["let_go"] == 1
    held = [one.housekeeping._known, one.housekeeping._swept_ms, one.snapshotting._progress, one.shards._slots]
    assert [len(found) for found in held] == [2] * 4
    bench.run(query, one, 2)
    assert one.failures() == {}
    query.check(bench.path, bench.threads)


def test_a_shard_that_is_called_rarely_as_all_are_stays(bench: Bench) -> None:
    """Idle is who is called much more rarely than the others, not who waits for a few micro-batches."""
    executor, query = bench.executor(), bench.query(shards=8)
    for batch in range(IDLE_ROUNDS * 2):
        bench.run(query, executor, shards=[batch % 8])
    assert len(local_shards(executor)) == 8
    assert counters(executor)["let_go"] == 0


def test_a_query_that_has_stopped_leaves_nothing(bench: Bench) -> None:
    """Neither in RAM, nor the options of its storage, nor empty folders."""
    executor, query, lasting = bench.executor(), bench.query(shards=2), bench.query("lasting")
    bench.run(query, executor, 3)
    for _ in range(3):
        bench.run(lasting, executor, step_ms=SILENT_MS // 2)
        executor.housekeeping.tidy_up()
    assert [p.name for p in executor.directory.glob("memory/*")] == ["query-lasting"]
    assert len(executor.housekeeping._known) == 1
    assert list((executor.directory / "going").iterdir()) == []
    bench.run(query, executor, 2)
    query.check(bench.path, bench.threads)


def test_a_shard_in_use_is_not_let_go(bench: Bench) -> None:
    """A call may take longer than everything that others do meanwhile."""
    executor, query = bench.executor(), bench.query(shards=1)
    bench.run(query, executor, 3)
    (message,) = executor.housekeeping._known.values()
    with executor.shards.use(message.shard) as backend:
        view = backend.view(query.rows[0][0])
    bench.clock.ms += 2 * SILENT_MS
    executor.housekeeping.tidy_up()
    assert local_shards(executor) == {"shard-0000"}
    view.close()
    executor.housekeeping.tidy_up()
    assert local_shards(executor) == set()


def test_a_shard_that_cannot_be_removed_ends_nothing(bench: Bench) -> None:
    """A disk that is full or failing must not end the state server, which looks after all other shards."""
    executor, query, lasting = bench.executor(), bench.query(), bench.query("lasting")
    bench.run(query, executor)
    bench.clock.ms += 2 * SILENT_MS
    going = executor.directory / "going"
    going.write_text("no directory can be made here")
    bench.run(lasting, executor)
    executor.housekeeping.tidy_up()
    assert counters(executor)["let_go"] == 0
    assert counters(executor)["errors"] == 1
    going.unlink()
    executor.housekeeping.tidy_up()
    assert counters(executor)["let_go"] == 1


def test_announcements_may_come_while_the_server_tidies_up(bench: Bench) -> None:
    """Queries with many shards announce all the time; an error there would end the server."""
    executor, query = bench.executor(), bench.query()
    bench.run(query, executor)
    (message,) = executor.housekeeping._known.values()
    others = [replace(message.shard, directory=f"{executor.directory}/memory/q/o/shard-{i:04d}") for i in range(3000)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(5):
            coming = [bench.threads.submit(_come_and_go, executor, message, others) for _ in range(2)]
            while not all(done.done() for done in coming):
                executor.housekeeping.tidy_up()
    finally:
        sys.setswitchinterval(before)


def _come_and_go(executor: Executor, message: Committed, shards: list[ShardAddress]) -> None:
    known = executor.housekeeping._known
    for shard in shards:
        known[shard.directory] = replace(message, shard=shard)
    for shard in shards:
        known.pop(shard.directory, None)


def test_without_a_checkpoint_directory_nothing_is_let_go(bench: Bench) -> None:
    """It is the only copy."""
    executor, query = bench.executor(), bench.query()
    bench.run(query, executor, 2)
    (message,) = executor.housekeeping._known.values()
    lone = message.__class__(**{**vars(message), "checkpoint_dir": None})
    executor.use.forget(message.shard.directory)
    executor.announce(lone)
    executor.drain()
    bench.clock.ms += 1000 * SILENT_MS
    executor.housekeeping.tidy_up()
    assert local_shards(executor) == {"shard-0000"}


def test_shards_that_a_killed_server_knew_are_let_go_too(tmp_path: Path) -> None:
    """What is in use is told by the folder, not by what one process has heard."""
    clock, operator = Clock(), tmp_path / "query" / "totals"
    for name in ("shard-0000-aa", "shard-0001-aa", "shard-0000-bb"):
        (operator / name).mkdir(parents=True)
    use = ShardUse(clock)
    for _ in range(2 * IDLE_ROUNDS + 1):
        use.called(str(operator / "shard-0000-aa"), in_memory=True)
    assert use.idle_beside(str(operator / "shard-0000-aa")) == [str(operator / "shard-0001-aa")]
    assert use.idle() == [str(operator / "shard-0001-aa")], "those of another configuration may be the only copy"


def test_few_calls_pay_for_a_restore(tmp_path: Path) -> None:
    """Of N calls at most N / IDLE_ROUNDS find their shard gone, however uneven they are."""
    rng, use = random.Random(3), ShardUse(Clock())
    shards = [str(tmp_path / "query" / "totals" / f"shard-{i:04d}-aa") for i in range(20)]
    here: set[str] = set()
    gone, calls = 0, 20_000
    for _ in range(calls):
        shard = shards[min(int(rng.expovariate(0.4)), 19)]
        gone += shard not in here
        here.add(shard)
        use.called(shard, in_memory=True)
        for idle in use.idle_beside(shard):
            here.discard(idle)
            use.forget(idle)
    assert 20 < gone <= 20 + calls / IDLE_ROUNDS


def test_storages_are_closed_when_nobody_needs_them(bench: Bench) -> None:
    """Their options may be credentials; one that is in use stays open, whatever becomes of its shard."""
    executor, query = bench.executor(), bench.query()
    for token in ("a", "b", "c"):
        query.token = token
        bench.run(query, executor, 5)
    assert len(executor.logs._opened) == 3
    executor.housekeeping.tidy_up()
    assert [dict(options) for _, options in executor.logs._opened] == [{"token": "c"}]
    (message,) = executor.housekeeping._known.values()
    with executor.logs.log_of(message) as log:
        executor.logs.close_unused([])
        assert log is not None
        assert log.storage.list("one/")
    executor.logs.close_unused([])
    assert executor.logs.requests() == {}
