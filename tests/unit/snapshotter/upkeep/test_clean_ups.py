"""Clean-ups, verification and shards that move in the long run, and failures in the background as others read them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import sys
import tracemalloc
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends import stored_file
from holdfast.errors import CorruptionError, UnavailableError
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import list_shard
from holdfast.snapshotter.upkeep.retention import run_retention
from holdfast.snapshotter.upkeep.troubles import batch_of, of_batch, read_trouble, report_trouble
from holdfast.snapshotter.upkeep.verification import verify_shard
from holdfast.spark_integration.client.messages import Committed, ShardAddress
from holdfast.spark_integration.executor.local_dirs import RUNS
from holdfast.spark_integration.executor.takeover import KEPT_MS
from holdfast.spark_integration.server.housekeeping import IDLE_ROUNDS, SILENT_MS, Housekeeping, ShardUse
from tests.model.shard_history import PREFIX, ShardHistory, TimedStorage, Version
from tests.soak.cluster import Clock, ClockedStorage
from tests.soak.cluster import Executor as BenchExecutor
from tests.tiers import ALL
from tests.unit.snapshotter.upkeep.conftest import HOUR_MS, Bench, counters, local_shards
from tests.unit.spark_integration.executor.damaged_disk import fail_at


@pytest.mark.all
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


@pytest.mark.slow
def test_a_job_of_one_micro_batch_uses_the_snapshots_of_the_one_before(bench: Bench) -> None:
    query = bench.query()
    written = cleaned = 0
    jobs = 60 if ALL else 40
    for _ in range(jobs):
        executor = bench.executor()
        bench.run(query, executor, step_ms=HOUR_MS)
        written += counters(executor)["snapshots"]
        cleaned += counters(executor)["clean_ups"]
        assert executor.failures() == {}
        bench.end(executor)
    assert abs(written - jobs / 5) <= 2
    assert cleaned >= jobs // 30
    query.check(bench.path, bench.threads)


@pytest.mark.slow(1)
def test_a_deleted_part_is_sent_again_before_anything_goes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each snapshot names the parts of files that stay as they are: all of them lacked it, and the rest was deleted."""
    # So that files stay.
    monkeypatch.setattr("holdfast.backends.run_files.backend.first_to_merge", lambda sizes, *_: len(sizes) - 1)
    executor, query = bench.executor(), bench.query(policy=SnapshotPolicy(max_commits=2), retained_versions=3)
    bench.run(query, executor, 12, step_ms=HOUR_MS)
    assert query.storage is not None
    snapshots = [bytes(query.storage.get(key)) for key in bench.stored("snapshots")]
    lost = next(key for key in bench.stored("files") if all(Path(key).name.encode() in one for one in snapshots))
    query.storage.delete([lost])
    bench.run(query, executor, 30, step_ms=HOUR_MS)
    query.check(bench.path, bench.threads)
    assert counters(executor)["clean_up_errors"] >= 1
    assert counters(executor)["snapshot_errors"] == 0
    failed = counters(executor)["clean_up_errors"]
    bench.run(query, executor, 10, step_ms=HOUR_MS)
    assert counters(executor)["clean_up_errors"] == failed, "once nothing needs what was stored before, all is well"
    assert len(bench.stored("commits")) < 30


@pytest.mark.slow(1)
def test_a_query_faster_than_its_uploads_is_cleaned_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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
                    with contextlib.suppress(FileNotFoundError):  # housekeeping drops versions too
                        old.rename(executor.directory / f"gone-{next(nested)}")

    monkeypatch.setattr(ClockedStorage, "put", put_while_the_query_goes_on)
    bench.run(query, executor, 60, step_ms=10 * 60_000)
    assert len(list(executor.directory.glob("gone-*"))) > 10
    assert counters(executor)["clean_ups"] >= 2
    assert executor.failures() == {}


@pytest.mark.slow
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


RETAINED = 100


class RunningQuery:
    """A query that goes on, and cleans up, while its shard is read."""

    def __init__(self) -> None:
        self.shard = ShardHistory(TimedStorage())
        self.newest: Version | None = None
        self.go_on(120)

    def go_on(self, versions: int) -> None:
        self.newest = self.shard.grow(self.newest, versions, snapshot_every=20)[-1]
        run_retention(
            PrefixedStorage(self.shard.storage, PREFIX),
            self.newest.pointer,
            self.newest.chain,
            retained=RETAINED,
            grace_ms=0,
        )


@pytest.mark.parametrize("after", [1, 50, 150], ids=lambda after: f"after {after} objects")
def test_what_is_cleaned_up_meanwhile_is_not_missing(executor: Executor, after: int) -> None:
    """The listing is older than what stands in for the objects that it names."""
    query, read = RunningQuery(), 0

    def one_more(_size_bytes: int) -> None:
        nonlocal read
        read += 1
        if read == after:
            query.go_on(60)

    report = verify_shard(query.shard.objects, executor, RETAINED, one_more)
    assert report.damages == ()
    assert report.versions >= RETAINED
    assert report.objects == len(query.shard.stored()), "as of a listing, not of a mixture of two"


def test_real_damage_is_told_whatever_goes_on(executor: Executor) -> None:
    """No number of listings ends it, and none explains it away."""
    shard = ShardHistory(TimedStorage())
    *_, newest = shard.grow(None, 30, snapshot_every=20)

    def go_on(_size_bytes: int) -> None:
        nonlocal newest
        newest = shard.commit(newest)

    lost = f"{PREFIX}/{newest.chain[-2].key}"
    shard.storage.delete([lost])
    report = verify_shard(shard.objects, executor, RETAINED, go_on)
    assert [damage.key for damage in report.damages] == [lost]


def peak_bytes(commits: int) -> int:
    """Return what it takes to verify so many commits, in chains of up to a hundred objects."""
    history = ShardHistory(TimedStorage())
    history.grow(None, commits, snapshot_every=100)
    with ThreadPoolExecutor(2) as executor:
        tracemalloc.start()
        try:
            report = verify_shard(history.objects, executor, commits)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert report.versions == commits
    assert not report.damages
    return peak


@pytest.mark.all
@pytest.mark.slow(5)
def test_chains_are_held_once() -> None:
    assert (peak_bytes(800) - peak_bytes(300)) / 500 < 3_000


def test_a_path_that_is_no_text_can_be_told_and_read(tmp_path: Path) -> None:
    """A local directory's name may be any bytes; the disk is full there, and nobody would hear of it."""
    with open_storage(str(tmp_path)) as storage:
        shard = PrefixedStorage(storage, "totals/shard-0003")
        report_trouble(shard, "snapshot", UnavailableError("the disk is full", folder="/data-\udcff"), 3, "host-1", 0)
        (told,) = shard.list("troubles/")
        assert read_trouble(shard, told.key).error == r"the disk is full, folder=/data-\udcff"


def test_of_a_shard_the_micro_batch_that_failed_last_is_kept(tmp_path: Path) -> None:
    """However many fail, one report stays, beside those of the background; its name tells which micro-batch."""
    with open_storage(str(tmp_path)) as storage:
        shard = PrefixedStorage(storage, "totals/shard-0003")
        report_trouble(shard, "snapshot", UnavailableError("the disk is full"), 3, "host-1", 0)
        for batch_id in (41, 42):
            report_trouble(shard, of_batch(batch_id), ValueError("no number: 'x'"), 1, "host-1", 0)
        found = {batch_of(info.key): read_trouble(shard, info.key) for info in shard.list("troubles/")}
        assert {batch_id: one.what for batch_id, one in found.items()} == {None: "snapshot", 42: "micro-batch-42"}
        assert found[42].error == "ValueError: no number: 'x'"
        (listed,) = [o for o in list_shard(shard).troubles if batch_of(o.key) is not None]
        assert listed.kind == "trouble"


def test_a_report_under_another_name_is_refused(tmp_path: Path) -> None:
    """A copied report of one micro-batch says nothing of another one."""
    with open_storage(str(tmp_path)) as storage:
        shard = PrefixedStorage(storage, "totals/shard-0003")
        report_trouble(shard, of_batch(42), ValueError("x"), 1, "host-1", 0)
        (told,) = shard.list("troubles/")
        moved = told.key.replace("-42-", "-43-")
        shard.put(moved, shard.get(told.key))
        with pytest.raises(CorruptionError, match="moved or copied"):
            read_trouble(shard, moved)


@pytest.mark.slow
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
    assert counters(one)["shards_dropped"] == 1
    held = [one.housekeeping._known, one.housekeeping._swept_ms, one.snapshotting._progress, one.shards._slots]
    assert [len(found) for found in held] == [2] * 4
    bench.run(query, one, 2)
    assert one.failures() == {}
    query.check(bench.path, bench.threads)


@pytest.mark.slow(1)
def test_a_shard_that_is_called_rarely_as_all_are_stays(bench: Bench) -> None:
    """Idle is who is called much more rarely than the others, not who waits for a few micro-batches."""
    executor, query = bench.executor(), bench.query(shards=8)
    for batch in range(IDLE_ROUNDS * 2):
        bench.run(query, executor, shards=[batch % 8])
    assert len(local_shards(executor)) == 8
    assert counters(executor)["shards_dropped"] == 0


def test_a_query_that_has_stopped_leaves_nothing(bench: Bench) -> None:
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
    with executor.shards.use(message) as backend:
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
    assert counters(executor)["shards_dropped"] == 0
    assert counters(executor)["errors"] == 1
    going.unlink()
    executor.housekeeping.tidy_up()
    assert counters(executor)["shards_dropped"] == 1


def test_a_shard_on_a_damaged_disk_ends_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a query that has ended: the operating system's own error would end the server when its day is over."""
    executor, query, lasting = bench.executor(), bench.query(), bench.query("lasting")
    bench.run(query, executor)
    (message,) = executor.housekeeping._known.values()
    bench.clock.ms += 2 * SILENT_MS
    bench.run(lasting, executor)
    with monkeypatch.context() as disk:
        fail_at(Path(message.shard.directory), "stat", disk)
        executor.housekeeping._drop_idle(executor.use.idle())
    assert counters(executor)["errors"] == 1
    executor.housekeeping.tidy_up()
    assert counters(executor)["shards_dropped"] == 1


@pytest.mark.parametrize("call", ["stat", "scandir"])
def test_a_damaged_disk_does_not_end_tidying_up(bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A server knows what has ended for a day; an error would end it, and each server after it, every five minutes."""
    executor, query = bench.executor(), bench.query()
    bench.run(query, executor)
    (message,) = executor.housekeeping._known.values()
    shard = Path(message.shard.directory)
    damaged = {"stat": shard, "scandir": shard.parent / RUNS}
    with monkeypatch.context() as disk:
        fail_at(damaged[call], call, disk)
        executor.housekeeping.tidy_up()
    assert executor.failures() == {}


@pytest.mark.slow(0.5)
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
            for done in coming:
                done.result()
    finally:
        sys.setswitchinterval(before)


def _come_and_go(executor: BenchExecutor, message: Committed, shards: list[ShardAddress]) -> None:
    known = executor.housekeeping._known
    for shard in shards:
        known[shard.directory] = replace(message, shard=shard)
    for shard in shards:
        known.pop(shard.directory, None)


def test_without_a_state_directory_nothing_is_let_go(bench: Bench) -> None:
    executor, query = bench.executor(), bench.query()
    bench.run(query, executor, 2)
    (message,) = executor.housekeeping._known.values()
    lone = message.__class__(**{**vars(message), "state_dir": None})
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
    assert use.idle_siblings(str(operator / "shard-0000-aa")) == [str(operator / "shard-0001-aa")]
    assert use.idle() == [str(operator / "shard-0001-aa")], "those of another configuration may be the only copy"


@pytest.mark.parametrize("is_called", [True, False], ids=["goes on", "has ended"])
def test_a_query_that_ended_before_its_server_was_killed_leaves_nothing(bench: Bench, *, is_called: bool) -> None:
    """Nobody announces its shards to the next server. What may be the only copy stays, and what is called."""
    executor, query = bench.executor(), bench.query(shards=2)
    bench.run(query, executor, 3)
    shard = next(executor.directory.glob("memory/*/totals/shard-0001-*"))
    unannounced = shard.with_name(shard.name.replace("0001", "0002"))  # its only call has failed
    others = [shard.with_name("shard-0000-0badcafe"), executor.directory / "memory" / "lone" / "totals" / shard.name]
    for path in (unannounced, *others):
        path.mkdir(parents=True)
    restarted = Housekeeping(executor.shards, executor.logs, ShardUse(bench.clock), lambda _: None, bench.clock)
    (message, _) = executor.housekeeping._known.values()
    for _ in range(3):
        restarted.tidy_up()
        assert shard.is_dir()
        bench.clock.ms += SILENT_MS // 3
        if is_called:
            restarted.announce(message)
            restarted.queue.end()
            restarted.run()
    bench.clock.ms += 1
    restarted.tidy_up()
    assert shard.is_dir() == unannounced.is_dir() == is_called
    assert all(path.is_dir() for path in others)


def test_shards_on_disk_of_a_killed_server_stay_for_a_day(tmp_path: Path) -> None:
    clock = Clock()
    here = {place: tmp_path / place / "query" / "totals" / "shard-0000-aa" for place in ("memory", "disk")}
    for place, shard in here.items():
        shard.mkdir(parents=True)
        ShardUse(clock).called(str(shard), in_memory=place == "memory")
    use = ShardUse(clock)
    use.count_existing(tmp_path)
    clock.ms += SILENT_MS + 1
    use.count_existing(tmp_path)
    assert use.idle() == [str(here["memory"])]
    clock.ms += KEPT_MS
    assert sorted(use.idle()) == sorted(map(str, here.values()))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT], ids=["damaged", "removed meanwhile"])
def test_an_unlistable_folder_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Of a query that has ended, say: an error would end the server, and each one that is started then."""
    clock = Clock()
    failing, other = (tmp_path / "disk" / query / "totals" / "shard-0000-aa" for query in ("one", "other"))
    for shard in (failing, other):
        shard.mkdir(parents=True)
        ShardUse(clock).called(str(shard), in_memory=False)
    fail_at(failing.parent, "scandir", monkeypatch, number)
    use = ShardUse(clock)
    use.count_existing(tmp_path)
    clock.ms += KEPT_MS + 1
    assert use.idle() == [str(other)]


@pytest.mark.slow(1)
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
        for idle in use.idle_siblings(shard):
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
    assert not executor.logs._opened
