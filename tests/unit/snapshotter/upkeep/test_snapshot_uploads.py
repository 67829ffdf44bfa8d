"""Snapshots in the long run, and commits of gigabytes, which are looked at in little memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast import clock
from holdfast.backends import local_files, stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.stored_file import BLOCK_BYTES, END_BYTES_MAX, NOTICE_BYTES_MAX
from holdfast.errors import CorruptionError, NotFoundError
from holdfast.snapshotter.commits import read_commit
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.wrappers import PrefixedStorage, WrappedStorage
from holdfast.snapshotter.upkeep import catalogue
from holdfast.snapshotter.upkeep.catalogue import Headers, StoredObject, list_shard
from holdfast.snapshotter.upkeep.retention import GRACE_MS, run_retention
from holdfast.snapshotter.upkeep.troubles import read_trouble
from holdfast.snapshotter.upkeep.verification import verify_shard
from holdfast.spark_integration.server import open_shards
from holdfast.spark_integration.server import snapshotting as snapshotting_module
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.damage import flipped
from tests.fuzz.forge import put_together, take_apart
from tests.model.shard_history import PREFIX, ShardHistory, TimedStorage
from tests.soak.cluster import ClockedStorage, Place
from tests.unit.snapshotter.upkeep.conftest import HOUR_MS, Bench, counters

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


def test_an_upload_lets_the_shard_be_opened_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, query = bench.executor(), bench.query()
    put, begun, opened = ClockedStorage.put, [], []

    def put_meanwhile(storage: ClockedStorage, key: str, data: Any) -> None:
        if "/files/" in key and not begun:
            begun.append(key)
            (message,) = executor.housekeeping._known.values()
            other = replace(message.shard, backend_options={"limit": "1g"})
            with executor.shards.use(replace(message, shard=other, announced_ms=clock.monotonic_ms() + 1)):
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
    monkeypatch.setattr("holdfast.snapshotter.snapshots.upload_files", _raise(NotFoundError("files/x is not there")))
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
    assert "cannot record the failure in" in caplog.text
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


FIRST = Pointer(1, "aa")
KEY = f"{PREFIX}/commits/{FIRST}"
ROWS_BYTES = 2 * BLOCK_BYTES + 17


class Watched(WrappedStorage):
    """Remembers the sizes of what was read."""

    def __init__(self) -> None:
        super().__init__(TimedStorage())
        self.read: list[int] = []

    def get(self, key: str, limit_bytes: int = NOTICE_BYTES_MAX) -> memoryview:
        data = super().get(key, limit_bytes)
        self.read.append(len(data))
        return data

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        data = super().get_range(key, start, end)
        self.read.append(len(data))
        return data


def large_commit(note: str = "") -> bytes:
    """Return a commit with rows of three blocks; `note` makes its footer larger."""
    tables = {"totals": 7, note or "others": 0}
    header = {"pointer": str(FIRST), "shard": PREFIX, "rows": tables, "plain_bytes": tables}
    header |= {"chain": [], "since": [str(FIRST)], "last": None}
    sections: dict[str, stored_file.SectionWriter] = {
        "totals": lambda file: file.write(bytes(ROWS_BYTES)),
        note or "others": lambda file: file.write(b""),
    }
    return stored_file.encode("commit", header, sections)[0].to_pybytes()


@pytest.fixture
def storage() -> Watched:
    return Watched()


def listed(storage: Watched) -> tuple[PrefixedStorage, StoredObject]:
    shard = PrefixedStorage(storage, PREFIX)
    return shard, list_shard(shard).objects[f"commits/{FIRST}"]


@pytest.mark.parametrize("footer_bytes", [0, 2 * END_BYTES_MAX])
def test_of_a_large_commit_only_the_end_is_read(storage: Watched, footer_bytes: int) -> None:
    """It says what the whole commit says."""
    data = large_commit("x" * footer_bytes)
    storage.put(KEY, data)
    shard, stored = listed(storage)
    found = Headers(shard).commit(stored)
    assert found == read_commit(data, PREFIX, FIRST, found.source).without_rows()
    assert sum(storage.read) <= 2 * END_BYTES_MAX + 4 * footer_bytes
    assert len(storage.read) == (2 if footer_bytes else 1)


def test_verification_reads_all_of_it_a_block_at_a_time(storage: Watched, executor: Executor) -> None:
    data = large_commit()
    storage.put(KEY, data)
    shard, _ = listed(storage)
    report = verify_shard(shard, executor, 100)
    assert (report.damages, report.versions, report.size_bytes) == ((), 1, len(data))
    assert sum(storage.read) >= len(data) - 24
    assert max(storage.read) <= BLOCK_BYTES


@pytest.mark.parametrize("at", [0, BLOCK_BYTES, ROWS_BYTES - 1])
def test_verification_finds_a_byte_that_was_altered(storage: Watched, executor: Executor, at: int) -> None:
    storage.put(KEY, flipped(bytes(large_commit()), at))
    (damage,) = verify_shard(listed(storage)[0], executor, 100).damages
    assert (damage.key, "checksum" in damage.problem) == (KEY, True)


def another_kind(data: bytes) -> bytes:
    body, footer = take_apart(data)
    return put_together(body, footer | {"kind": "snapshot"})


def rows_beyond_the_end(data: bytes) -> bytes:
    body, footer = take_apart(data)
    footer["sections"][0] |= {"size_bytes": 1 << 40, "plain_bytes": 1 << 40}
    return put_together(body, footer)


HARMS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "cut": ("its end is missing", lambda data: data[:-1]),
    "a footer larger than any": ("footer of an impossible size", lambda d: d[:-32] + b"\xff" * 4 + d[-28:]),
    "no footer": ("unreadable footer", lambda d: d[: -32 - 100] + b"?" * 100 + d[-32:]),
    "another kind": ("not the requested object", another_kind),
    "rows beyond the end": ("outside its bytes", rows_beyond_the_end),
    "another version": ("belongs elsewhere", lambda data: data.replace(b'"1-aa","shard', b'"1-ab","shard')),
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_end_is_believed_only_as_far_as_it_can_be_true(storage: Watched, harm: str) -> None:
    problem, do = HARMS[harm]
    storage.put(KEY, do(large_commit()))
    with pytest.raises(CorruptionError, match=problem) as raised:
        Headers(listed(storage)[0]).commit(listed(storage)[1])
    assert KEY in str(raised.value)
    assert sum(storage.read) <= END_BYTES_MAX


def test_a_commit_larger_than_any_is_not_read(storage: Watched) -> None:
    shard, stored = PrefixedStorage(storage, PREFIX), StoredObject(f"commits/{FIRST}", "commit", FIRST, 1 << 33, 0)
    with pytest.raises(CorruptionError, match="larger than any commit"):
        Headers(shard).commit(stored)
    assert storage.read == []


def test_a_damaged_end_makes_nothing_go_that_a_restore_may_fall_back_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checksum proves the end of a large commit: the snapshot that it names must be there, as all others must."""
    storage = TimedStorage()
    shard = ShardHistory(storage)
    made = shard.grow(None, 30, snapshot_every=10)
    storage.now_ms += 2 * GRACE_MS
    key = f"{PREFIX}/commits/{made[19].pointer}"  # the last one before the snapshot on which the anchor builds
    fallback = next(entry for entry in shard.manifests if entry.version == 10)
    data, stored_ms = storage.objects[key]
    name = str(fallback.pointer).encode()
    storage.objects[key] = (data.replace(name, b"11" + name[2:]), stored_ms)
    monkeypatch.setattr(catalogue, "NOTICE_BYTES_MAX", 0)
    with pytest.raises(CorruptionError, match="an object that others build on is missing"):
        run_retention(PrefixedStorage(storage, PREFIX), made[-1].pointer, made[-1].chain, retained=5)
    assert any(key.startswith(f"{PREFIX}/{fallback.key}") for key in storage.objects)
