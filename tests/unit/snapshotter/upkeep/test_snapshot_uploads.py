"""Snapshots in the long run: slow uploads, failures that repeat, queries that go back, intervals."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends import local_files
from holdfast.errors import NotFoundError
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.snapshotter.upkeep.troubles import read_trouble
from holdfast.spark_integration.server import open_shards
from holdfast.spark_integration.server import snapshotting as snapshotting_module
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.soak.cluster import ClockedStorage, Place
from tests.unit.snapshotter.upkeep.upkeep_bench import HOUR_MS, Bench, counters

# Uploads that take long


@pytest.mark.slow(0.5)
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


def test_an_upload_does_not_keep_the_shard_from_being_opened_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that is restarted with other columns cannot wait for an upload of its last run, which may take long."""
    executor, query = bench.executor(), bench.query()
    put, begun, opened = ClockedStorage.put, [], []

    def put_meanwhile(storage: ClockedStorage, key: str, data: Any) -> None:
        if "/files/" in key and not begun:
            begun.append(key)
            (message,) = executor.housekeeping._known.values()
            with executor.shards.use(replace(message.shard, backend_options={"limit": "1g"})):
                opened.append(key)
        put(storage, key, data)

    monkeypatch.setattr(open_shards, "REPLACE_WITHIN_SECONDS", 3.0)
    monkeypatch.setattr(ClockedStorage, "put", put_meanwhile)
    bench.run(query, executor, 6)
    assert opened == begun != []
    assert counters(executor)["snapshots"] >= 1


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


@pytest.mark.slow(1)
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
    assert "cannot be recorded in" in caplog.text
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


@pytest.mark.slow
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


@pytest.mark.slow(1)
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


@pytest.mark.slow(0.5)
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
