"""Local directories: who may enter them, the lock, the socket and the logs of a state server, and what is removed."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.executor.processes import ProcessId
from tests.unit.spark_integration.executor.damaged_disk import fail_at

DEAD = ProcessId(2**22 + 1, 1)
AS_ROOT = os.getuid() == 0


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    local_dirs._warn_once.cache_clear()
    return path


# Private directories


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_directory_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = local_dirs.executor_directory(tmp_path, DEAD)
    finally:
        os.umask(before)
    assert made == tmp_path / f"holdfast-{os.getuid()}" / f"executor-{DEAD}"
    assert [stat.S_IMODE(p.stat().st_mode) for p in (made, made.parent)] == [0o700, 0o700]
    assert local_dirs.executor_directory(tmp_path, DEAD) == made


@pytest.mark.parametrize("mode", [0o770, 0o701, 0o777, 0o750])
def test_one_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    """In a directory such as /dev/shm anybody could have made it first."""
    path = tmp_path / f"holdfast-{os.getuid()}"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(InvalidArgumentError, match="not a private directory") as caught:
        local_dirs.user_directory(tmp_path)
    assert caught.value.facts["mode"] == oct(mode)
    assert "spark.holdfast.local.dir" in str(caught.value)


def test_a_link_and_one_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link also where it leads to a private directory."""
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.mkdir(mode=0o700)
    link.symlink_to(mine)
    with pytest.raises(InvalidArgumentError, match="not a private directory"):
        local_dirs.private_directory(link)
    monkeypatch.setattr(os, "getuid", lambda: mine.stat().st_uid + 1)
    with pytest.raises(InvalidArgumentError, match="not a private directory"):
        local_dirs.private_directory(mine)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="not a private directory"):
        local_dirs.private_directory(tmp_path / "file")
    with pytest.raises(UnavailableError, match=r"file.*spark\.holdfast\.local\.dir"):
        local_dirs.private_directory(tmp_path / "file" / "below")


@pytest.mark.skipif(AS_ROOT, reason="root may write everywhere")
def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UnavailableError, match="writable"):
        local_dirs.user_directory(tmp_path)


# The root


def test_a_configured_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert local_dirs.choose_root(str(tmp_path), in_memory=True) == tmp_path


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [
        ("/disk1/spark,/disk2/spark", "/disk1/spark"),
        ("/disk1/blockmgr-7a8b,/disk2/blockmgr-9c0d", "/disk1"),  # the executor's blocks, deleted when it ends
        ("", None),
        (None, None),
        ("relative", os.path.abspath("relative")),
    ],
)
def test_disk_is_the_first_of_sparks_directories(
    variable: str | None, chosen: str | None, monkeypatch: pytest.MonkeyPatch, own_temporary_directory: Path
) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    if variable is not None:
        monkeypatch.setenv("SPARK_LOCAL_DIRS", variable)
    assert local_dirs.choose_root(None, in_memory=False) == Path(chosen or own_temporary_directory)


@pytest.mark.parametrize("why", ["small", "absent", "not writable"])
def test_without_enough_shared_memory_state_goes_to_disk_and_one_warning_says_so(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers often give 64 MB: a query would fail in the middle."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    free = 64 << 20 if why == "small" else 1 << 40
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 41, 0, free))
    if why == "absent":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: os.stat("/nowhere"))
    if why == "not writable":
        monkeypatch.setattr(os, "access", lambda *_: False)
    assert [local_dirs.choose_root(None, in_memory=True) for _ in range(3)] == [tmp_path] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "spark.holdfast.local.dir" in record.message
    assert str(tmp_path) in record.message


def test_enough_shared_memory_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_dirs, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 41, 0, local_dirs.SHARED_MEMORY_MIN_BYTES))
    assert local_dirs.choose_root(None, in_memory=True) == tmp_path


def test_a_place_of_another_user_is_no_error_until_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who makes the directory says what to do; nobody may even look into it."""

    asked: list[Path] = []

    def denied(path: Path) -> bool:
        asked.append(path)
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(local_dirs, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 41, 0, local_dirs.SHARED_MEMORY_MIN_BYTES))
    monkeypatch.setattr(Path, "is_dir", denied)
    assert local_dirs.choose_root(None, in_memory=True) == tmp_path
    assert asked


@pytest.mark.parametrize("began_in", ["shared memory", "disk"])
def test_an_executor_stays_in_ram_if_begun(began_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own state fills shared memory, others free it: chosen anew, the state of a running query would be gone."""
    shared_memory, disk = tmp_path / "shm", tmp_path / "disk"
    shared_memory.mkdir()
    monkeypatch.setattr(local_dirs, "SHARED_MEMORY", shared_memory)
    monkeypatch.setattr(local_dirs, "executor_process", lambda: DEAD)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(disk))
    enough, too_little = (local_dirs.SHARED_MEMORY_MIN_BYTES + extra for extra in (0, -1))
    chosen = []
    for free in (enough, too_little, enough) if began_in == "shared memory" else (too_little, enough, too_little):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(1 << 41, 0, free))
        chosen.append(local_dirs.choose_root(None, in_memory=True))
        local_dirs.shards_directory(local_dirs.executor_directory(chosen[-1], DEAD), in_memory=True)
        # State on disk decides nothing.
        local_dirs.shards_directory(local_dirs.executor_directory(disk, DEAD), in_memory=False)
    assert chosen == [shared_memory if began_in == "shared memory" else disk] * 3


# Names


def test_state_in_ram_and_on_disk_lies_apart(tmp_path: Path) -> None:
    memory, disk = (local_dirs.shards_directory(tmp_path, in_memory=in_memory) for in_memory in (True, False))
    assert (memory.name, disk.name) == ("memory", "disk")
    assert [stat.S_IMODE(p.stat().st_mode) for p in (memory, disk)] == [0o700, 0o700]


def test_the_name_of_a_shard_changes_with_what_its_versions_need() -> None:
    """Local versions on which no commit can build, or with other rows in them, must not be found."""
    name = local_dirs.shard_name(3, 4, "filesystem", "/data/app")
    assert name == local_dirs.shard_name(3, 4, "filesystem", "/data/app") == "shard-0003-ccf8803f"
    others = [
        local_dirs.shard_name(3, 4, "filesystem", None),
        local_dirs.shard_name(3, 4, "filesystem", "/data/other"),
        local_dirs.shard_name(3, 5, "filesystem", "/data/app"),
        local_dirs.shard_name(3, 4, "rocksdb", "/data/app"),
    ]
    assert len({name, *others}) == 5


def test_the_lock_has_one_holder(tmp_path: Path) -> None:
    lock = local_dirs.take_lock(tmp_path)
    assert lock is not None
    assert local_dirs.take_lock(tmp_path) is None
    os.close(lock)
    again = local_dirs.take_lock(tmp_path)
    assert again is not None
    assert not os.get_inheritable(again), "a process that the server starts must not keep its lock"
    os.close(again)


def test_those_who_share_the_lock_keep_others_out(tmp_path: Path) -> None:
    """Several workers take over shards of one dead executor; nobody removes it meanwhile, nor serves it."""
    shared = [local_dirs.take_lock(tmp_path, shared=True) for _ in range(2)]
    assert None not in shared
    assert local_dirs.take_lock(tmp_path) is None
    for descriptor in shared:
        assert descriptor is not None
        os.close(descriptor)
    alone = local_dirs.take_lock(tmp_path)
    assert alone is not None
    assert local_dirs.take_lock(tmp_path, shared=True) is None
    os.close(alone)


def test_the_socket_of_a_long_path_lies_elsewhere(tmp_path: Path, own_temporary_directory: Path) -> None:
    """Unix sockets have names of at most some 107 bytes."""
    short = Path("/x/executor-1-1")
    assert local_dirs.socket_path(short) == short / "state-server.sock"
    long = local_dirs.executor_directory(tmp_path / ("x" * 120), DEAD)
    assert local_dirs.socket_path(long).parent == own_temporary_directory / f"holdfast-{os.getuid()}"
    other = local_dirs.executor_directory(tmp_path / ("y" * 120), DEAD)
    assert local_dirs.socket_path(other) != local_dirs.socket_path(long), "each has a server of its own"


def test_logs_are_removed_when_they_are_a_week_old(own_temporary_directory: Path) -> None:
    local_dirs.make_log_directory()
    old, new = (local_dirs.log_path(Path(f"executor-{i}-1")) for i in (1, 2))
    other = old.with_name("notes.log")
    for path in (old, new, other):
        path.touch()
    day_s = 24 * 60 * 60
    for path in (old, other):
        os.utime(path, (0, 0))
    os.utime(new, (8 * day_s, 8 * day_s))
    local_dirs.remove_old_logs(9 * day_s * 1000)
    assert [p.exists() for p in (old, new, other)] == [False, True, True]


def test_logs_on_a_damaged_disk_end_no_server(own_temporary_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for old ones every five minutes, beside its work for shards on other disks."""
    local_dirs.make_log_directory()
    fail_at(local_dirs.log_path(Path("executor-1-1")).parent, "scandir", monkeypatch)
    local_dirs.remove_old_logs(0)


def test_state_servers_of_one_executor_have_logs_of_their_own(own_temporary_directory: Path) -> None:
    """One in RAM, one on disk: each would move the other's log away while that writes to it."""
    in_ram, on_disk = (local_dirs.log_path(Path(root) / f"executor-{DEAD}") for root in ("/dev/shm/me", "/disk/me"))
    assert in_ram != on_disk
    local_dirs.make_log_directory()
    for path in (in_ram, on_disk):
        path.write_text("said long ago")
        os.utime(path, (1, 1))
    local_dirs.remove_old_logs(10 * local_dirs.LOG_KEPT_MS)
    assert list(in_ram.parent.iterdir()) == [], "and both are known as a dead executor's"


def test_the_log_of_an_executor_that_lives_stays(own_temporary_directory: Path) -> None:
    """A quiet server still writes to it."""
    local_dirs.make_log_directory()
    mine = local_dirs.log_path(Path(f"executor-{ProcessId.of(os.getpid())}"))
    for path in (mine, local_dirs.log_path(Path(f"executor-{DEAD}")), mine.with_name(f"{mine.name}.1")):
        path.write_text("said long ago")
        os.utime(path, (1, 1))
    local_dirs.remove_old_logs(10 * local_dirs.LOG_KEPT_MS)
    assert sorted(p.name for p in mine.parent.iterdir()) == [mine.name, f"{mine.name}.1"]


def test_the_log_is_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker makes it that starts the server; its mask is its executor's."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = os.umask(0)
    try:
        with pytest.raises(UnavailableError, match="no more processes"):
            StateClient(local_dirs.private_directory(tmp_path / "executor-1-1")).start_server()
    finally:
        os.umask(before)
    assert local_dirs.log_path(tmp_path / "executor-1-1").stat().st_mode & 0o077 == 0


LOGS = """
import logging, os, sys
from holdfast.spark_integration.server.state_server import ServerLog
logging.basicConfig(handlers=[ServerLog(sys.argv[1], maxBytes=2000, backupCount=1)], level=logging.INFO)
for i in range(500):
    logging.info("line %d", i)
os.write(2, b"native code says something\\n")
"""


@pytest.mark.slow(1)
def test_the_log_is_bounded_and_takes_what_native_code_says(tmp_path: Path) -> None:
    """A server runs for weeks; gRPC and a dying interpreter write to the error output, past any handler."""
    path = tmp_path / "server.log"
    with path.open("ab") as log:
        subprocess.run([sys.executable, "-c", LOGS, path], stdout=log, stderr=log, check=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["server.log", "server.log.1"]
    assert all(p.stat().st_size <= 2100 for p in tmp_path.iterdir())
    assert path.read_text().endswith("native code says something\n")
    assert "line 499" in path.read_text()


def test_without_a_temporary_directory_it_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only system; a commit that was only to be announced must not fail by an error that nobody maps."""

    def none_is_usable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_usable)
    client = StateClient(tmp_path)
    for call in (client.start_server, client.require_server):
        with pytest.raises(UnavailableError, match="set TMPDIR"):
            call()
