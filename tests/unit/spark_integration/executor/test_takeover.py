"""What dead executors left: one living executor takes a shard over, whole and verified, and the rest goes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.rocksdb.backend import RocksDBBackend
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.errors import NotFoundError, UnavailableError
from holdfast.spark_integration.executor import local_dirs, takeover
from holdfast.spark_integration.executor.processes import ProcessId
from holdfast.testing.state_rows import TABLES, contents, counts
from tests.damage import flip
from tests.unit.spark_integration.executor.damaged_disk import fail_at

DEAD, DEAD_TOO = ProcessId(2**22 + 1, 1), ProcessId(2**22 + 2, 1)
SHARD = Path("disk", "query", "totals", "shard-0003-0123abcd")
DAY_MS = 24 * 60 * 60_000
FIRST, SECOND = Pointer(1, "aa"), Pointer(2, "bb")


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("tmp")))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "WAIT_MS", 0)


@pytest.fixture
def living() -> Iterator[ProcessId]:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield ProcessId.of(process.pid)
        process.kill()


def open_backend(path: Path) -> FilesystemBackend:
    return FilesystemBackend(path, TABLES, clock.new_id)


def leave_shard(root: Path, executor: ProcessId, versions: int = 2) -> Path:
    """Make what an executor leaves of a shard: version n counts n users."""
    directory = local_dirs.executor_directory(root, executor)
    backend = open_backend(directory / SHARD)
    base = None
    for version in range(1, versions + 1):
        pointer = Pointer(version, "aabbcc"[2 * version - 2 :][:2])
        backend.apply(base, pointer, counts((f"user {version}", version)), {})
        base = pointer
    (directory / SHARD.parent / "runs").mkdir()
    return directory


def adopt(root: Path, executor: ProcessId) -> tuple[bool, Path]:
    directory = local_dirs.executor_directory(root, executor)
    return takeover.adopt_shard(directory / SHARD, directory, open_backend), directory / SHARD


def users_of(shard: Path, pointer: Pointer) -> int:
    with open_backend(shard).view(pointer) as view:
        return len(contents(view, "counts"))


# Taking over


def test_a_shard_of_a_dead_executor_is_taken_over_once(tmp_path: Path, living: ProcessId) -> None:
    dead = leave_shard(tmp_path, DEAD)
    taken, shard = adopt(tmp_path, living)
    assert taken
    assert [users_of(shard, p) for p in (FIRST, SECOND)] == [1, 2]
    assert not (dead / SHARD).exists()
    assert adopt(tmp_path, living) == (False, shard), "it is here now"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_database_is_verified_by_who_takes_it_over(
    tmp_path: Path, living: ProcessId, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """Its backend holds the shard's directory while it makes a folder there: that must not wait for its own process."""
    monkeypatch.setattr(RocksDBBackend, "share_bytes", lambda _: 0)
    dead = local_dirs.executor_directory(tmp_path, DEAD)
    with RocksDBBackend(dead / SHARD, TABLES, clock.new_id) as backend:
        backend.apply(None, FIRST, counts(("user 1", 1)), {})
        assert backend.maintain(FIRST) == 1
        backend.apply(FIRST, SECOND, {}, {})
        backend.drop([FIRST])
    (table,) = (dead / SHARD).glob("generations/*/*.sst")
    if is_damaged:
        flip(table, table.stat().st_size // 3, unnoticed=True)
    directory = local_dirs.executor_directory(tmp_path, living)

    def open_database(path: Path) -> RocksDBBackend:
        return RocksDBBackend(path, TABLES, clock.new_id, {}, directory)

    assert takeover.adopt_shard(directory / SHARD, directory, open_database)
    with open_database(directory / SHARD) as backend:
        assert backend.versions() == ([] if is_damaged else [SECOND])
        for pointer in backend.versions():
            with backend.view(pointer) as view:
                assert contents(view, "counts") == {("user 1",): (1,)}
    assert not (directory / SHARD / "taking-over").exists()


def test_nothing_is_taken_from_a_living_executor(tmp_path: Path, living: ProcessId) -> None:
    """Nor from one whose process cannot be seen, while its server runs."""
    alive = leave_shard(tmp_path, ProcessId.of(os.getpid()))
    hidden = leave_shard(tmp_path, DEAD)
    lock = local_dirs.take_lock(hidden)
    assert lock is not None
    assert not adopt(tmp_path, living)[0]
    assert (alive / SHARD).exists()
    assert (hidden / SHARD).exists()
    os.close(lock)
    assert adopt(tmp_path, living)[0]


@pytest.mark.slow(0.5)
def test_an_ending_server_is_waited_for(tmp_path: Path, living: ProcessId, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still merge: the restart of a query comes seconds after the end of its executor."""
    monkeypatch.setattr(takeover, "WAIT_MS", 20_000)
    lock = local_dirs.take_lock(leave_shard(tmp_path, DEAD))
    assert lock is not None
    timer = threading.Timer(0.3, os.close, [lock])
    timer.start()
    began_ms = clock.monotonic_ms()
    assert adopt(tmp_path, living)[0]
    assert 250 < clock.monotonic_ms() - began_ms < 10_000
    timer.join()


def test_of_several_the_newest_is_taken(tmp_path: Path, living: ProcessId) -> None:
    """A shard that moved between executors left an older copy behind."""
    leave_shard(tmp_path, DEAD, versions=3)
    older = leave_shard(tmp_path, DEAD_TOO, versions=2)
    taken, shard = adopt(tmp_path, living)
    assert taken
    assert users_of(shard, Pointer(3, "cc")) == 3
    assert (older / SHARD).exists()


def test_a_damaged_version_is_set_aside_before_anybody_reads_it(
    tmp_path: Path, living: ProcessId, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that look untouched, too: only their digest tells."""
    dead = leave_shard(tmp_path, DEAD)
    (run,) = (dead / SHARD / "versions" / "1-aa").glob("*.arrow")
    flip(run, run.stat().st_size // 3, unnoticed=True)
    taken, shard = adopt(tmp_path, living)
    assert taken
    with pytest.raises(NotFoundError):
        users_of(shard, FIRST)
    assert str(dead / SHARD / "versions" / "1-aa") in caplog.text


def test_of_many_workers_one_takes_it(tmp_path: Path, living: ProcessId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "WAIT_MS", 10_000)
    for attempt in range(10):
        root = tmp_path / str(attempt)
        leave_shard(root, DEAD)
        executors = [living, ProcessId.of(os.getpid())]
        with ThreadPoolExecutor(4) as threads:
            tried = list(threads.map(adopt, [root] * 4, executors * 2))
        (shard,) = [path for was_taken, path in tried if was_taken]
        assert users_of(shard, SECOND) == 2


@pytest.mark.slow(0.5)
def test_a_directory_that_is_another_one_when_it_is_locked_is_left_alone(
    tmp_path: Path, living: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock stays with what another worker moved away; a worker of the dead executor may have made its place anew."""
    monkeypatch.setattr(takeover, "WAIT_MS", 20_000)
    shard = leave_shard(tmp_path, DEAD) / SHARD
    held = os.open(shard / "taking-over", os.O_RDWR | os.O_CREAT)
    assert local_dirs.try_lock(held)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(adopt, tmp_path, living)
        clock.sleep_ms(300)
        shard.rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", shard)
        os.close(held)
        assert not waiting.result()[0]
    assert adopt(tmp_path, living)[0]


def test_only_what_is_private_is_taken(tmp_path: Path, living: ProcessId, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever could write there could plant state."""
    open_to_all = leave_shard(tmp_path, DEAD)
    open_to_all.chmod(0o755)
    linked = local_dirs.executor_directory(tmp_path, DEAD_TOO) / SHARD
    linked.parent.mkdir(parents=True)
    shutil.copytree(open_to_all / SHARD, tmp_path / "planted")
    linked.symlink_to(tmp_path / "planted")
    assert not adopt(tmp_path, living)[0]
    assert str(open_to_all) in caplog.text
    assert str(linked) in caplog.text
    open_to_all.chmod(0o700)
    assert adopt(tmp_path, living)[0]


def test_a_shard_without_versions_is_not_worth_a_move(tmp_path: Path, living: ProcessId) -> None:
    leave_shard(tmp_path, DEAD, versions=0)
    assert not adopt(tmp_path, living)[0]


# What goes


def fill(path: Path, state: str = "memory") -> Path:
    """Make an executor's directory with a file of 1000 bytes in a shard."""
    versions = path / state / "query" / "totals" / "shard-0000" / "versions"
    versions.mkdir(parents=True)
    (versions / "run").write_bytes(b"x" * 1000)
    os.link(versions / "run", versions / "same")
    return path


def test_dead_executors_are_removed_and_live_ones_and_other_files_kept(
    tmp_path: Path, living: ProcessId, caplog: pytest.LogCaptureFixture
) -> None:
    alive = fill(local_dirs.executor_directory(tmp_path, living))
    reused = fill(local_dirs.executor_directory(tmp_path, ProcessId(living.pid, 1)))
    dead = fill(local_dirs.executor_directory(tmp_path, DEAD))
    other = fill(local_dirs.user_directory(tmp_path) / "executor-notes")
    takeover.remove_dead_executors(tmp_path, clock.now_ms())
    assert [p.exists() for p in (alive, reused, dead, other)] == [True, False, False, True]
    assert sorted(r.message for r in caplog.records) == sorted(
        f"removed 1000 bytes that a dead executor left in {p}" for p in (reused, dead)
    )


def test_shards_on_disk_wait_for_a_day(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The day begins when they are found: a machine that was off over the weekend loses nothing."""
    dead = fill(fill(local_dirs.executor_directory(tmp_path, DEAD)), "disk")
    now_ms = clock.now_ms()
    takeover.remove_dead_executors(tmp_path, now_ms)
    assert sorted(p.name for p in dead.iterdir()) == ["disk", "found-dead", "state-server.lock"]
    takeover.remove_dead_executors(tmp_path, now_ms + DAY_MS - 60_000)
    assert (dead / "disk").exists()
    caplog.clear()
    takeover.remove_dead_executors(tmp_path, now_ms + DAY_MS + 1)
    assert not dead.exists()
    assert caplog.messages == [f"removed 1000 bytes that a dead executor left in {dead}"]


def test_an_executor_whose_shards_were_all_taken_over_goes(tmp_path: Path, living: ProcessId) -> None:
    dead = leave_shard(tmp_path, DEAD)
    takeover.remove_dead_executors(tmp_path, clock.now_ms())
    assert adopt(tmp_path, living)[0]
    takeover.remove_dead_executors(tmp_path, clock.now_ms())
    assert not dead.exists()


def test_an_executor_that_ends_leaves_only_shards_on_disk(tmp_path: Path, own_temporary_directory: None) -> None:
    both = fill(leave_shard(tmp_path, DEAD))
    (both / "state-server.sock").touch()
    takeover.leave_executor_directory(both)
    assert [p.name for p in both.iterdir()] == ["disk"]
    ram = fill(local_dirs.executor_directory(tmp_path / ("x" * 120), DEAD))
    local_dirs.socket_path(ram).touch()
    takeover.leave_executor_directory(ram)
    assert not ram.exists()
    assert not local_dirs.socket_path(ram).exists(), "it lies in the temporary directory"


KILLED = """
import sys
from pathlib import Path
from holdfast.spark_integration.executor.takeover import working_directory
with working_directory(sys.argv[1]) as path:
    (path / "rows").write_bytes(b"x" * 1000)
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow(0.5)
def test_what_a_killed_process_worked_on_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As that of a task of a savepoint, when its executor runs out of memory; while the process lives, it stays."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        takeover.remove_dead_executors(tmp_path, clock.now_ms())
        assert (path / "rows").exists()
        process.kill()
    with takeover.working_directory(str(tmp_path)) as own:
        assert not path.parent.exists(), "the next one removes it, as a state server does"
        assert caplog.messages == [f"removed 1000 bytes that a dead executor left in {path.parent}"]
        with takeover.working_directory(str(tmp_path)) as another:
            assert another != own, "a web page reads several queries at once"
        assert own.exists()
        assert not another.parent.exists()
    assert not list(local_dirs.user_directory(tmp_path).iterdir())


def test_who_works_in_many_looks_for_the_dead_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pointers of 200 partitions took 200 of them, and each looked at all that dead executors have left."""
    begun_ms = clock.monotonic_ms()
    for after_ms, is_left in ((0, False), (takeover.LOOK_EVERY_MS - 1, True), (takeover.LOOK_EVERY_MS, False)):
        dead = fill(local_dirs.executor_directory(tmp_path, DEAD))
        monkeypatch.setattr(clock, "monotonic_ms", lambda now_ms=begun_ms + after_ms: now_ms)
        with takeover.working_directory(str(tmp_path)):
            assert dead.exists() is is_left
        shutil.rmtree(dead, ignore_errors=True)


def test_a_directory_that_cannot_be_locked_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page lives for months, and asks again and again; a network file system may have no locks."""

    opened: list[int] = []

    def refuse(descriptor: int, _: int) -> None:
        opened.append(descriptor)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UnavailableError, match="No locks available"), takeover.working_directory(str(tmp_path)):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    assert not list(local_dirs.user_directory(tmp_path).iterdir())


def test_an_executor_that_cannot_be_seen_but_whose_server_runs_is_kept(tmp_path: Path) -> None:
    """Containers with process numbers of their own may share a directory."""
    elsewhere = fill(local_dirs.executor_directory(tmp_path, DEAD))
    lock = local_dirs.take_lock(elsewhere)
    assert lock is not None
    takeover.remove_dead_executors(tmp_path, clock.now_ms())
    assert elsewhere.exists()
    os.close(lock)
    takeover.remove_dead_executors(tmp_path, clock.now_ms())
    assert not elsewhere.exists()


def test_another_server_that_removes_first_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = fill(local_dirs.executor_directory(tmp_path, DEAD))
    take = local_dirs.take_lock

    def take_too_late(path: Path, *, shared: bool = False) -> int | None:
        shutil.rmtree(path)
        return take(path, shared=shared)

    monkeypatch.setattr(takeover, "take_lock", take_too_late)
    takeover.remove_dead_executors(tmp_path, clock.now_ms())
    assert not dead.exists()


@pytest.mark.parametrize("failing", ["listdir", "stat"])
def test_a_dead_executor_that_cannot_be_read_holds_up_nothing(
    tmp_path: Path, living: ProcessId, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Where its place on a disk is damaged: an error would end each state server of the machine as it begins."""
    unreadable, readable = leave_shard(tmp_path, DEAD), local_dirs.executor_directory(tmp_path, DEAD_TOO)
    fail_at(unreadable, failing, monkeypatch)
    takeover.remove_dead_executors(tmp_path, clock.now_ms())
    assert not readable.exists()
    leave_shard(tmp_path, DEAD_TOO)
    assert adopt(tmp_path, living)[0]


def test_a_shard_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the operating system's own would end the state server, which looks after all other shards."""
    mine = local_dirs.executor_directory(tmp_path, DEAD)
    fail_at(mine / SHARD, "stat", monkeypatch)
    with pytest.raises(UnavailableError, match="cannot be used"):
        takeover.open_backend("filesystem", mine / SHARD, TABLES, {}, mine)


def test_a_link_among_local_state_is_removed_and_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dead = local_dirs.executor_directory(tmp_path, DEAD)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (dead / "memory").symlink_to(tmp_path / "precious")
    with caplog.at_level(logging.INFO):
        takeover.remove_dead_executors(tmp_path, clock.now_ms())
    assert not dead.exists()
    assert (tmp_path / "precious" / "file").exists()
