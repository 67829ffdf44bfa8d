"""The lock, the socket and the logs of a state server: one of each for each directory of an executor."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.errors import UnavailableError
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.executor.processes import ProcessId
from tests.unit.spark_integration.executor.damaged_disk import fail_at

DEAD = ProcessId(2**22 + 1, 1)


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


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


def test_the_socket_of_a_long_path_lies_in_the_temporary_directory(
    tmp_path: Path, own_temporary_directory: Path
) -> None:
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


def test_without_a_temporary_directory_the_error_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a read-only system; a commit that was only to be announced must not fail by an error that nobody maps."""

    def none_is_usable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none_is_usable)
    client = StateClient(tmp_path)
    for call in (client.start_server, client.require_server):
        with pytest.raises(UnavailableError, match="set TMPDIR"):
            call()
