"""What an executor keeps of shards that moved away or stopped: nothing."""

from __future__ import annotations

import errno
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.spark_integration.client.messages import Committed, ShardAddress
from holdfast.spark_integration.executor.local_dirs import RUNS
from holdfast.spark_integration.executor.takeover import KEPT_MS
from holdfast.spark_integration.server.housekeeping import Housekeeping
from holdfast.spark_integration.server.shard_use import IDLE_ROUNDS, SILENT_MS, ShardUse
from tests.soak.cluster import Clock, Executor
from tests.unit.snapshotter.upkeep.upkeep_bench import Bench, counters, local_shards
from tests.unit.spark_integration.executor.damaged_disk import fail_at


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
    assert counters(one)["let_go"] == 1
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


def test_a_shard_on_a_damaged_disk_ends_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a query that has ended: the operating system's own error would end the server when its day is over."""
    executor, query, lasting = bench.executor(), bench.query(), bench.query("lasting")
    bench.run(query, executor)
    (message,) = executor.housekeeping._known.values()
    bench.clock.ms += 2 * SILENT_MS
    bench.run(lasting, executor)
    with monkeypatch.context() as disk:
        fail_at(Path(message.shard.directory), "stat", disk)
        executor.housekeeping._let_go(executor.use.idle())
    assert counters(executor)["errors"] == 1
    executor.housekeeping.tidy_up()
    assert counters(executor)["let_go"] == 1


@pytest.mark.parametrize("call", ["stat", "scandir"])
def test_what_a_query_has_on_a_damaged_disk_does_not_end_tidying_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
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


def _come_and_go(executor: Executor, message: Committed, shards: list[ShardAddress]) -> None:
    known = executor.housekeeping._known
    for shard in shards:
        known[shard.directory] = replace(message, shard=shard)
    for shard in shards:
        known.pop(shard.directory, None)


def test_without_a_state_directory_nothing_is_let_go(bench: Bench) -> None:
    """It is the only copy."""
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
    assert use.idle_beside(str(operator / "shard-0000-aa")) == [str(operator / "shard-0001-aa")]
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
    use.take_up(tmp_path)
    clock.ms += SILENT_MS + 1
    use.take_up(tmp_path)
    assert use.idle() == [str(here["memory"])]
    clock.ms += KEPT_MS
    assert sorted(use.idle()) == sorted(map(str, here.values()))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT], ids=["damaged", "removed meanwhile"])
def test_a_folder_that_cannot_be_listed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of a query that has ended, say: an error would end the server, and each one that is started then."""
    clock = Clock()
    failing, other = (tmp_path / "disk" / query / "totals" / "shard-0000-aa" for query in ("one", "other"))
    for shard in (failing, other):
        shard.mkdir(parents=True)
        ShardUse(clock).called(str(shard), in_memory=False)
    fail_at(failing.parent, "scandir", monkeypatch, number)
    use = ShardUse(clock)
    use.take_up(tmp_path)
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
