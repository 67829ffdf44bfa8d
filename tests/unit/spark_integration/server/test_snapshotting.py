"""A storage that is slow for one shard holds up nobody else: neither other shards, nor a query that restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.schema import TableSchema
from holdfast.errors import UnavailableError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.client.messages import Committed, ShardAddress
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.server import open_shards, snapshotting
from holdfast.spark_integration.server.durable_logs import DurableLogs
from holdfast.spark_integration.server.open_shards import OpenShards
from holdfast.spark_integration.server.snapshotting import Snapshotting
from holdfast.spark_integration.server.state_server import UPLOAD_THREADS
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.testing.state_rows import COUNTS, keys_of, values_of
from tests.faults.executor_process import eventually
from tests.storage_in_ram import storage_in_ram

OTHER = "memory://other"
NEW_THREADS = partial(ThreadPoolExecutor, UPLOAD_THREADS)


class Bench:
    """The snapshots of an executor's shards, whose commits and storage a test makes."""

    def __init__(self, root: Path, storage: ObjectStorage, other: ObjectStorage) -> None:
        self.storage = FaultyStorage(storage)
        self.threads = ThreadPoolExecutor(8)
        self.shards = OpenShards(root)
        self.logs = DurableLogs(NEW_THREADS, lambda url, options: other if url == OTHER else self.storage)
        self.snapshotting = Snapshotting(self.shards, self.logs)
        self.root = root
        self._newest: dict[str, Pointer | None] = {}

    def commit(self, shard: str, times: int = 1, at: str = "memory://") -> Committed:
        """Commit so many versions of a shard, and return the announcement of the newest."""
        address = ShardAddress.of(self.root / "query" / "totals" / shard, "memory", {}, {"counts": COUNTS})
        message = Committed(address, None, Pointer(0, "none"), f"totals/{shard}", at, {}, SnapshotPolicy(1), 9)
        for _ in range(times):
            with self.logs.log_of(message) as log, self.shards.use(address) as backend:
                accepted = self._newest.get(shard)
                with VersionedStore(backend, log).begin(accepted) as transaction:
                    transaction.put("counts", keys_of(COUNTS, [("a",)], [1]), values_of(COUNTS, [(1,)]))
                    committed = transaction.commit()
            assert committed is not None
            self._newest[shard], message = committed, replace(message, accepted=accepted, committed=committed)
        return message

    def snapshots(self, shard: str) -> list[str]:
        """Return the versions of a shard that have a snapshot in the storage."""
        return [
            info.key.rpartition("/")[2].rpartition("-")[0] for info in self.storage.list(f"totals/{shard}/snapshots/")
        ]

    def slow(self, action: str, key: str, times: int = 1) -> tuple[threading.Event, threading.Event]:
        """Let the next such requests wait; return what tells that one has begun, and what lets them go on."""
        begun, going_on = threading.Event(), threading.Event()

        def wait() -> None:
            begun.set()
            going_on.wait(20)

        self.storage.faults.append(Fault("delay", action, key, times=times, wait=wait))  # type: ignore[arg-type]
        return begun, going_on


def with_another_column(shard: ShardAddress) -> ShardAddress:
    """Return the address of a shard as a query has it that was restarted with another column."""
    columns = TableSchema.of("counts", COUNTS.key, pa.schema([*COUNTS.value, ("more", pa.int64())]))
    return ShardAddress.of(shard.directory, "memory", {}, {"counts": columns})


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with storage_in_ram() as storage, storage_in_ram() as other:
        made = Bench(local_dirs.private_directory(tmp_path / "executor"), storage, other)
        working = made.threads.submit(made.snapshotting.run)
        yield made
        made.snapshotting.queue.end()
        working.result(20)
        made.threads.shutdown()
        made.shards.close(1.0)
        made.logs.close_unused([])


def test_a_snapshot_that_a_worker_waits_for_holds_up_no_other_shard(bench: Bench) -> None:
    """And the shard's own newer version has its turn once that is written."""
    begun, going_on = bench.slow("put", "totals/a/snapshots/*")
    try:
        writing = bench.threads.submit(bench.snapshotting.write_now, bench.commit("a", times=4))
        assert begun.wait(10)
        newer = bench.commit("a")
        bench.snapshotting.announce(newer)
        bench.snapshotting.announce(bench.commit("b"))
        eventually(lambda: bench.snapshots("b"))
        assert not bench.snapshots("a")
    finally:
        going_on.set()
    assert writing.result(10) is True
    eventually(lambda: str(newer.committed) in bench.snapshots("a"))


def test_a_storage_that_hangs_holds_up_no_snapshot_in_another(bench: Bench) -> None:
    """Else the query there fails in the end, as its chains of commits become too long."""
    elsewhere = bench.commit("c", times=4, at=OTHER)
    begun, going_on = bench.slow("put", "totals/*/files/*", times=UPLOAD_THREADS)
    try:
        for shard in ("a", "b"):
            bench.threads.submit(bench.snapshotting.write_now, bench.commit(shard, times=4))
        assert begun.wait(10)
        eventually(lambda: bench.storage.faults[0].hits == UPLOAD_THREADS)
        assert bench.threads.submit(bench.snapshotting.write_now, elsewhere).result(5) is True
    finally:
        going_on.set()


@pytest.mark.parametrize("in_use", [True, False], ids=["in use", "unused"])
def test_a_query_that_restarts_with_other_columns_keeps_its_shard(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, in_use: bool
) -> None:
    """Snapshots are looked for meanwhile: it was told to stop another query, which did not exist.

    Nor does the snapshot of the run before wait for it, fail, or take the shard back: that version was missed.
    """
    monkeypatch.setattr(open_shards, "REPLACE_WITHIN_SECONDS", 1.0)
    message = bench.commit("a")
    begun, going_on = bench.slow("list", "totals/a/snapshots/*")
    address = with_another_column(message.shard)
    counters = bench.snapshotting.counters
    try:
        bench.snapshotting.announce(message)
        assert begun.wait(10)
        with bench.shards.use(address) as reopened:
            assert reopened.tables["counts"].value.names == ["n", "more"]
            if in_use:
                going_on.set()
                eventually(lambda: sum(counters.values()))
        going_on.set()
        eventually(lambda: sum(counters.values()))
    finally:
        going_on.set()
    assert (counters["snapshots_missed"], counters["snapshot_errors"], counters["snapshots"]) == (1, 0, 0)
    with bench.shards.use(address) as still:
        assert still is reopened


@pytest.mark.parametrize("in_use", [True, False], ids=["in use", "unused"])
def test_a_query_that_has_restarted_keeps_its_shard_from_what_was_announced_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, in_use: bool
) -> None:
    """Its turn came late, as another shard's upload took long: nothing waits 30 s then, or is reported as a failure."""
    monkeypatch.setattr(open_shards, "REPLACE_WITHIN_SECONDS", 1.0)
    begun, going_on = bench.slow("put", "totals/b/snapshots/*")
    message = bench.commit("a")
    address = with_another_column(message.shard)
    try:
        bench.snapshotting.announce(bench.commit("b"))
        assert begun.wait(10)
        bench.snapshotting.announce(message)
        with bench.shards.use(address) as reopened:
            if in_use:
                going_on.set()
                assert bench.snapshotting.queue.drain(10)
    finally:
        going_on.set()
    assert bench.snapshotting.queue.drain(10)
    counters = bench.snapshotting.counters
    assert (counters["snapshots_missed"], counters["snapshot_errors"], counters["snapshots"]) == (1, 0, 1)
    with bench.shards.use(address) as still:
        assert still is reopened


def test_a_shard_that_is_let_go_meanwhile_is_not_made_again(bench: Bench) -> None:
    """Nobody would know of the folder, nor take it away."""
    message = bench.commit("a")
    begun, going_on = bench.slow("list", "totals/a/snapshots/*")
    try:
        bench.snapshotting.announce(message)
        assert begun.wait(10)
        assert bench.shards.remove(Path(message.shard.directory))
    finally:
        going_on.set()
    assert bench.snapshotting.queue.drain(10)
    assert bench.snapshotting.counters["snapshots_missed"] == 1
    assert not Path(message.shard.directory).exists()


def test_a_restarted_query_has_a_snapshot_of_a_shard_that_only_snapshots_open(bench: Bench) -> None:
    """Where workers open their files themselves, the shard is open here as it was before the restart."""
    message = bench.commit("a")
    columns = TableSchema.of("counts", COUNTS.key, pa.schema([*COUNTS.value, ("more", pa.int64())]))
    address = ShardAddress.of(Path(message.shard.directory), "memory", {}, {"counts": columns})
    time.sleep(0.002)  # the clock of announcements has ticked since the shard was opened
    bench.snapshotting.announce(Committed.decode(replace(message, shard=address).encode()))
    eventually(lambda: bench.snapshots("a") == [str(message.committed)])


def test_a_storage_that_does_not_close_ends_nothing(tmp_path: Path) -> None:
    """The server tidies up in its main thread; S3's connections are waited for, and may hang."""

    class Stuck(FaultyStorage):
        def close(self) -> None:
            raise TimeoutError

    root = local_dirs.private_directory(tmp_path / "executor")
    address = ShardAddress.of(root / "query" / "totals" / "a", "memory", {}, {"counts": COUNTS})
    message = Committed(address, None, Pointer(0, "none"), "totals/a", "memory://", {}, SnapshotPolicy(1), 9)
    with storage_in_ram() as storage:
        logs = DurableLogs(NEW_THREADS, lambda url, options: Stuck(storage))
        with logs.log_of(message):
            pass
        logs.close_unused([])
        assert logs.requests() == {}


def test_a_worker_does_not_wait_for_ever_for_a_snapshot_that_another_wants(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has given up by then, and each of its calls left a waiting thread behind, as long as the storage hung."""
    monkeypatch.setattr(snapshotting, "BUSY_SECONDS", 0.05)
    begun, going_on = bench.slow("put", "totals/a/snapshots/*")
    message = bench.commit("a", times=4)
    try:
        writing = bench.threads.submit(bench.snapshotting.write_now, message)
        assert begun.wait(10)
        waiting = bench.threads.submit(bench.snapshotting.write_now, message)
        with pytest.raises(UnavailableError, match="another snapshot"):
            waiting.result(10)
    finally:
        going_on.set()
    assert writing.result(10) is True
