"""State servers: how long they work, what they clean up, what they show, and that slow storage holds nobody up."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.backends.schema import TableSchema
from holdfast.errors import NotFoundError, UnavailableError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration.client.measures import CallMeasures
from holdfast.spark_integration.client.messages import Committed, MeasuredBatch, ShardAddress
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.executor.local_dirs import CLAIM_SUFFIX, RUNS
from holdfast.spark_integration.executor.processes import ProcessId
from holdfast.spark_integration.server import open_shards, snapshotting, state_server
from holdfast.spark_integration.server.exposition import Exposition, MeasuredBatches, ServerMetrics
from holdfast.spark_integration.server.housekeeping import (
    LEFTOVER_EVERY_MS,
    Housekeeping,
    ShardUse,
    remove_if_empty,
    remove_old_runs,
)
from holdfast.spark_integration.server.open_shards import DurableLogs, OpenShards
from holdfast.spark_integration.server.snapshotting import Snapshotting
from holdfast.spark_integration.server.state_server import UPLOAD_THREADS
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from holdfast.testing.state_rows import COUNTS, TABLES, keys_of, values_of
from tests.faults.executor_process import eventually
from tests.ram import storage_in_ram
from tests.servers.programs import free_ports
from tests.unit.spark_integration.executor.damaged_disk import fail_at

ROUNDS = 3


class Tidying(Housekeeping):
    """Housekeeping of nothing, in whose second turn something happens; the executor ends after `ROUNDS`."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.turns = 0
        self._happens = happens

    def tidy_up(self) -> None:
        self.turns += 1
        if self.turns == 2:
            self._happens()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return local_dirs.executor_directory(tmp_path, ProcessId.of(os.getpid()))


@pytest.fixture
def lock(directory: Path) -> Iterator[int]:
    descriptor = local_dirs.take_lock(directory)
    assert descriptor is not None
    local_dirs.socket_path(directory).touch()
    yield descriptor
    os.close(descriptor)


def has_served_to_the_end(directory: Path, lock: int, happens: Callable[[], object]) -> bool:
    tidying = Tidying(happens)
    executor = ProcessId.of(os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessId, "wait", lambda *_: tidying.turns >= ROUNDS)
        socket = local_dirs.socket_path(directory)
        has_ended = state_server._tidy_up_until_end(tidying, directory, executor, socket, lock)
    assert tidying.turns == (ROUNDS if has_ended else 2)
    return has_ended


def test_it_works_until_its_executor_ends(directory: Path, lock: int) -> None:
    assert has_served_to_the_end(directory, lock, lambda: None)


def test_its_lock_never_looks_old(directory: Path, lock: int) -> None:
    """Who cleans /tmp by age leaves it alone: else a server of ten days would end, with what it has not flushed."""
    assert has_served_to_the_end(directory, lock, lambda: os.utime(lock, (0, 0)))
    assert (directory / local_dirs.LOCK_NAME).stat().st_mtime > 0


def test_it_ends_where_another_server_may_run_beside_it(directory: Path, lock: int) -> None:
    """A program that cleans /tmp by age takes the lock's file after ten days: nobody writes to it.

    Each of two would let go, as no longer used, what is announced to the other.
    """

    def lose_the_lock() -> None:
        (directory / local_dirs.LOCK_NAME).unlink()
        another = local_dirs.take_lock(directory)
        assert another is not None, "whoever wants a server starts one"
        os.close(another)

    assert not has_served_to_the_end(directory, lock, lose_the_lock)


def test_it_ends_where_nobody_can_reach_it(directory: Path, lock: int) -> None:
    """It would keep the lock, and so whoever needs a server from starting one."""
    assert not has_served_to_the_end(directory, lock, local_dirs.socket_path(directory).unlink)


@pytest.mark.parametrize("hidden", ["lock", "socket"])
def test_it_stays_on_a_damaged_disk(directory: Path, lock: int, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    """Each server after it would end as well, every five minutes; what it has open goes on."""
    paths = {"lock": directory / local_dirs.LOCK_NAME, "socket": local_dirs.socket_path(directory)}
    assert has_served_to_the_end(directory, lock, lambda: fail_at(paths[hidden], "stat", monkeypatch))


def test_it_ends_where_its_directory_is_gone(directory: Path, lock: int) -> None:
    assert not has_served_to_the_end(directory, lock, lambda: shutil.rmtree(directory))


def test_the_notes_of_former_runs_go(tmp_path: Path) -> None:
    """A query that is started again and again leaves two files each time."""
    runs = tmp_path / "totals" / RUNS
    runs.mkdir(parents=True)
    for i in range(5):
        for name in (f"run-{i}", f"run-{i}{CLAIM_SUFFIX}"):
            (runs / name).write_text("")
            os.utime(runs / name, (i, i))
    os.utime(runs / f"run-1{CLAIM_SUFFIX}", (99, 99))  # a long run: its claim was renewed just now
    remove_old_runs(tmp_path)
    assert {p.name.removesuffix(CLAIM_SUFFIX) for p in runs.iterdir()} == {"run-1", "run-4"}
    remove_old_runs(tmp_path / "absent")


def test_an_operator_without_shards_leaves_no_folder(tmp_path: Path) -> None:
    operator, other = tmp_path / "query" / "totals", tmp_path / "query" / "other"
    (operator / RUNS).mkdir(parents=True)
    (operator / RUNS / "run-1").write_text("")
    (other / "shard-0000-aa").mkdir(parents=True)
    remove_if_empty(other)
    remove_if_empty(operator)
    assert [p.name for p in (tmp_path / "query").iterdir()] == ["other"]
    assert (other / "shard-0000-aa").is_dir()


def test_a_query_without_shards_leaves_no_folder(tmp_path: Path) -> None:
    """One that was second keeps its shards in a directory of its own, and has notes in the first one's, too."""
    first, own = tmp_path / "query" / "totals", tmp_path / "query" / "totals@query"
    for operator in (first, own):
        (operator / RUNS).mkdir(parents=True)
        for run in ("run-1", "run-2", "run-3"):
            (operator / RUNS / run).write_text("")
    shard = own / "shard-0000-aa"
    shard.mkdir()
    remove_old_runs(own.parent)
    assert [len(list((operator / RUNS).iterdir())) for operator in (first, own)] == [2, 2]
    shard.rmdir()
    remove_if_empty(own)
    assert not any(tmp_path.iterdir())


DAY_MS = 86_400_000


def commit_to(shards: OpenShards, directory: Path) -> Committed:
    """Commit the first version of a shard, and return its announcement."""
    address = ShardAddress.of(directory, "memory", {}, TABLES)
    message = Committed(address, None, Pointer(0, "none"), "", None, {}, SnapshotPolicy(), 0)
    with shards.use(message) as backend, VersionedStore(backend).begin(None) as first:
        first.put("counts", keys_of(COUNTS, [("a",)], [1]), values_of(COUNTS, [(1,)]))
        pointer = first.commit()
    assert pointer is not None
    return replace(message, committed=pointer, announced_ms=clock.monotonic_ms())


def wanted_now(message: Committed, address: ShardAddress) -> Committed:
    """Return what a query announces that wants the shard from now on."""
    return replace(message, shard=address, announced_ms=clock.monotonic_ms() + 1)


def test_leftovers_go_although_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when it has caught up."""
    now_ms = [1_700_000_000_000]
    swept: list[int] = []

    def remove_leftovers(backend: MemoryBackend, before_ns: int) -> int:
        swept.append(now_ms[0])
        return 0

    monkeypatch.setattr(MemoryBackend, "remove_leftovers", remove_leftovers)
    root = local_dirs.private_directory(tmp_path / "executor")
    shards = OpenShards(root)
    keeping = Housekeeping(
        shards, DurableLogs(partial(ThreadPoolExecutor, 1)), ShardUse(), lambda _: None, lambda: now_ms[0]
    )
    message = commit_to(shards, root / "query" / "op" / "shard")
    for at_ms in (0, LEFTOVER_EVERY_MS - 1, LEFTOVER_EVERY_MS, -DAY_MS, LEFTOVER_EVERY_MS - DAY_MS):
        now_ms[0] = 1_700_000_000_000 + at_ms
        keeping.announce(message)
        keeping.queue.end()
        keeping.run()
    shards.close(1.0)
    assert [at - 1_700_000_000_000 for at in swept] == [0, LEFTOVER_EVERY_MS, -DAY_MS, LEFTOVER_EVERY_MS - DAY_MS]


def test_a_shard_that_a_restarted_query_uses_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run before has announced of it has waited for its turn; other shards would wait 30 s with it."""
    monkeypatch.setattr(open_shards, "REPLACE_WITHIN_SECONDS", 1.0)
    root = local_dirs.private_directory(tmp_path / "executor")
    shards = OpenShards(root)
    keeping = Housekeeping(shards, DurableLogs(partial(ThreadPoolExecutor, 1)), ShardUse(), lambda _: None)
    message = commit_to(shards, root / "query" / "op" / "shard")
    keeping.announce(message)
    keeping.queue.end()
    address = replace(message.shard, tables=ShardAddress.of("", "", {}, {"counts": COUNTS}).tables)
    with shards.use(wanted_now(message, address)):
        keeping.run()
    shards.close(1.0)
    assert keeping.counters["errors"] == 0


def test_of_two_announcements_the_newer_one_has_the_shard(tmp_path: Path) -> None:
    """The older one had its turn late, and opened the shard after the newer one, of a restarted query, had come."""
    shards = OpenShards(local_dirs.private_directory(tmp_path / "executor"))
    older = commit_to(shards, shards.root / "query" / "op" / "shard")
    shards.close(1.0)
    clock.sleep_ms(2)
    address = replace(older.shard, tables=ShardAddress.of("", "", {}, {"counts": COUNTS}).tables)
    newer = replace(older, shard=address, announced_ms=clock.monotonic_ms())
    clock.sleep_ms(2)
    with shards.use(older):
        pass
    with shards.use(newer) as backend:
        assert set(backend.tables) == {"counts"}
    shards.close(1.0)


def test_a_query_that_goes_back_to_its_columns_keeps_its_shard(tmp_path: Path) -> None:
    """It found the shard open as it wants it: what was announced of it with others in between is older."""
    shards = OpenShards(local_dirs.private_directory(tmp_path / "executor"))
    first = commit_to(shards, shards.root / "query" / "op" / "shard")
    clock.sleep_ms(2)
    address = replace(first.shard, tables=ShardAddress.of("", "", {}, {"counts": COUNTS}).tables)
    between = replace(first, shard=address, announced_ms=clock.monotonic_ms())
    clock.sleep_ms(2)
    with shards.use(wanted_now(first, first.shard)):
        pass
    with pytest.raises(NotFoundError, match="has been reopened"), shards.use(between):
        pass
    shards.close(1.0)


COMMITTED = Committed(
    ShardAddress("/local/query/totals/shard-0000", "memory", {}, {}),
    accepted=None,
    committed=Pointer(1, "0123456789abcdef"),
    prefix="totals/shard-0000",
    state_dir=None,
    storage_options={},
    policy=SnapshotPolicy(),
    retained_versions=2,
)


@pytest.fixture
def exposition() -> Iterator[Exposition]:
    found = Exposition(ServerMetrics(MeasuredBatches(), dict, dict), lambda: 0)
    yield found
    found.close()


def test_gauges_are_of_the_last_calls_of_all_shards() -> None:
    batches = MeasuredBatches()
    for number, rows in enumerate((5, 9)):
        call = CallMeasures(number, rows, *range(2, 13), state_rows=10 * rows, state_bytes=100, snapshot_lag_versions=3)
        shard = replace(COMMITTED.shard, directory=f"/local/query/totals/shard-000{number}")
        batches.announce(replace(COMMITTED, shard=shard, measured=MeasuredBatch(1, 1_000, call.announced())))
    metrics = ServerMetrics(batches, Counter, lambda: {"/local/query/totals/shard-0001": 2_500})
    found = {sample.name: sample.value for family in metrics.collect() for sample in family.samples if sample.labels}
    told = {"batches_total": 1, "calls_total": 2, "rows_total": 14, "call_seconds_total": 16e-6, "shards": 2}
    told |= {"state_rows": 140, "state_bytes": 200, "shard_state_rows_max": 90, "shard_rows_max": 9}
    told |= {"shard_call_seconds_max": 8e-6, "snapshot_lag_versions_max": 3, "snapshot_lag_seconds_max": 2.5}
    assert found | {f"holdfast_{name}": value for name, value in told.items()} == found


@pytest.mark.parametrize("address", ["a..b", "x" * 300, "no.such.host.invalid", "\udcff", "1.2.3.4.5", "-"])
def test_an_address_that_is_none_fails_no_announcement(exposition: Exposition, address: str) -> None:
    """The rest of the announcement is handled whatever the address says."""
    exposition.announce(replace(COMMITTED, metrics_port=free_ports(1)[0], metrics_address=address))
    assert (exposition.port, exposition.failures) == (None, 1)


def test_shards_that_announce_at_once_open_one_port(exposition: Exposition, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second port would be one that nobody closes, and that the next executor lacks."""
    message = replace(COMMITTED, metrics_port=free_ports(1)[0])
    listening: list[socket.socket] = []
    listen = socket.socket.listen

    def counted(one: socket.socket, *backlog: int) -> None:
        listening.append(one)
        listen(one, *backlog)

    monkeypatch.setattr(socket.socket, "listen", counted)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(exposition.announce, [message] * 64))
    assert exposition.port is not None
    assert len(listening) == 1


def test_an_announcement_of_a_release_without_metrics_is_read() -> None:
    """A state server outlives an upgrade of the workers, and the other way round."""
    fields = json.loads(replace(COMMITTED, metrics_port=9321).encode())
    for name in ("metrics_address", "metrics_port", "measured"):
        del fields[name]
        read = Committed.of_bytes(json.dumps(fields | {"of a later release": 1}).encode())
        assert read.metrics_address == "127.0.0.1"
    assert read.metrics_port is None


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
            with self.logs.log_of(message) as log, self.shards.use(message) as backend:
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


def with_another_column(message: Committed) -> Committed:
    """Return what a query announces of a shard that is restarted now with another column."""
    columns = TableSchema.of("counts", COUNTS.key, pa.schema([*COUNTS.value, ("more", pa.int64())]))
    address = ShardAddress.of(message.shard.directory, "memory", {}, {"counts": columns})
    return replace(message, shard=address, announced_ms=clock.monotonic_ms() + 1)


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
    restarted = with_another_column(message)
    counters = bench.snapshotting.counters
    try:
        bench.snapshotting.announce(message)
        assert begun.wait(10)
        with bench.shards.use(restarted) as reopened:
            assert reopened.tables["counts"].value.names == ["n", "more"]
            if in_use:
                going_on.set()
                eventually(lambda: sum(counters.values()))
        going_on.set()
        eventually(lambda: sum(counters.values()))
    finally:
        going_on.set()
    assert (counters["snapshots_missed"], counters["snapshot_errors"], counters["snapshots"]) == (1, 0, 0)
    with bench.shards.use(restarted) as still:
        assert still is reopened


@pytest.mark.parametrize("in_use", [True, False], ids=["in use", "unused"])
def test_a_query_that_has_restarted_keeps_its_shard_from_what_was_announced_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, in_use: bool
) -> None:
    """Its turn came late, as another shard's upload took long: nothing waits 30 s then, or is reported as a failure."""
    monkeypatch.setattr(open_shards, "REPLACE_WITHIN_SECONDS", 1.0)
    begun, going_on = bench.slow("put", "totals/b/snapshots/*")
    message = bench.commit("a")
    restarted = with_another_column(message)
    try:
        bench.snapshotting.announce(bench.commit("b"))
        assert begun.wait(10)
        bench.snapshotting.announce(message)
        with bench.shards.use(restarted) as reopened:
            if in_use:
                going_on.set()
                assert bench.snapshotting.queue.drain(10)
    finally:
        going_on.set()
    assert bench.snapshotting.queue.drain(10)
    counters = bench.snapshotting.counters
    assert (counters["snapshots_missed"], counters["snapshot_errors"], counters["snapshots"]) == (1, 0, 1)
    with bench.shards.use(restarted) as still:
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
    bench.snapshotting.announce(Committed.of_bytes(replace(message, shard=address).encode()))
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
        assert not logs._opened


def test_a_worker_gives_up_waiting_for_anothers_snapshot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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
