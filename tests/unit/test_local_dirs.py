"""Where local state goes: into directories nobody else can enter, and away when its executor is dead."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.spark_integration import local_dirs
from holdfast.spark_integration.processes import ProcessId

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
    monkeypatch.setattr(local_dirs, "_warned", set())
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


def test_a_link_is_refused_also_to_a_private_directory(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(InvalidArgumentError, match="not a private directory"):
        local_dirs.private_directory(tmp_path / "link")


def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(InvalidArgumentError, match="not a private directory"):
        local_dirs.private_directory(path)


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


# What dead executors left


@pytest.fixture
def executor() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def fill(path: Path) -> Path:
    (path / "query" / "versions").mkdir(parents=True)
    (path / "query" / "versions" / "run").write_bytes(b"x" * 1000)
    os.link(path / "query" / "versions" / "run", path / "query" / "versions" / "same")
    return path


def test_dead_executors_are_removed_and_live_ones_and_other_files_kept(
    tmp_path: Path, executor: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    living = fill(local_dirs.executor_directory(tmp_path, ProcessId.of(executor.pid)))
    reused = fill(local_dirs.executor_directory(tmp_path, ProcessId(executor.pid, 1)))
    dead = fill(local_dirs.executor_directory(tmp_path, DEAD))
    other = fill(local_dirs.user_directory(tmp_path) / "executor-notes")
    local_dirs.remove_dead_executors(tmp_path)
    assert [p.exists() for p in (living, reused, dead, other)] == [True, False, False, True]
    assert sorted(r.message for r in caplog.records) == sorted(
        f"removed 1000 bytes that a dead executor left in {p}" for p in (reused, dead)
    )


def test_an_executor_that_cannot_be_seen_but_whose_server_runs_is_kept(tmp_path: Path) -> None:
    """Containers with process numbers of their own may share a directory."""
    elsewhere = fill(local_dirs.executor_directory(tmp_path, DEAD))
    lock = local_dirs.take_lock(elsewhere)
    assert lock is not None
    local_dirs.remove_dead_executors(tmp_path)
    assert elsewhere.exists()
    os.close(lock)
    local_dirs.remove_dead_executors(tmp_path)
    assert not elsewhere.exists()


def test_another_server_that_removes_first_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = fill(local_dirs.executor_directory(tmp_path, DEAD))
    take = local_dirs.take_lock

    def take_too_late(path: Path) -> int | None:
        shutil.rmtree(path)
        return take(path)

    monkeypatch.setattr(local_dirs, "take_lock", take_too_late)
    local_dirs.remove_dead_executors(tmp_path)
    assert not dead.exists()


def test_the_lock_has_one_holder(tmp_path: Path) -> None:
    lock = local_dirs.take_lock(tmp_path)
    assert lock is not None
    assert local_dirs.take_lock(tmp_path) is None
    os.close(lock)
    again = local_dirs.take_lock(tmp_path)
    assert again is not None
    assert not os.get_inheritable(again), "a process that the server starts must not keep its lock"
    os.close(again)


def test_the_socket_of_a_long_path_lies_in_the_temporary_directory(
    tmp_path: Path, own_temporary_directory: Path
) -> None:
    """Unix sockets have names of at most some 107 bytes."""
    short = Path("/x/executor-1-1")
    assert local_dirs.socket_path(short) == short / "state-server.sock"
    long = local_dirs.executor_directory(tmp_path / ("x" * 120), DEAD)
    assert local_dirs.socket_path(long).parent == own_temporary_directory / f"holdfast-{os.getuid()}"
    local_dirs.socket_path(long).touch()
    local_dirs.remove_dead_executors(tmp_path / ("x" * 120))
    assert not long.exists()
    assert not local_dirs.socket_path(long).exists()


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
