"""The state server as a real process: started on demand, killed, left behind, and how it ends."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from holdfast.errors import UnavailableError
from holdfast.spark_integration.client import connection
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.server import state_server
from tests.faults.executor_process import (
    PATIENCE_SECONDS,
    Executor,
    StartExecutor,
    eventually,
)
from tests.faults.state_server.shard import Shard, counters


def test_it_starts_on_demand_and_answers(executor: Executor) -> None:
    client = executor.client()
    with pytest.raises(UnavailableError, match="no state server listens"):
        client.call("ping")
    statistics = executor.start(client)
    assert psutil.Process(statistics["pid"]).is_running()
    assert client.call("ping") is None
    assert client.call("drain", b'{"timeout_seconds": 1.0}') is True
    assert statistics["shards"] == {}
    mode = local_dirs.socket_path(executor.directory).stat().st_mode
    assert mode & 0o077 == 0, "only this user may connect"


def test_of_several_that_start_at_once_one_starts(executor: Executor) -> None:
    """Every worker of the executor finds none at its first batch; more would cost a second of CPU each."""
    clients = [executor.client() for _ in range(3)]
    for client in clients:
        client.start_server()
    started = [c.launch.process.pid for c in clients if c.launch.process is not None]
    pids = [eventually(lambda c=client: c.call("statistics"))["pid"] for client in clients]
    assert pids == started * 3


def test_one_client_starts_one_server_at_a_time(executor: Executor) -> None:
    """Every batch of every shard asks while the first server is still on its way up."""
    client = executor.client()
    client.start_server()
    first = client.launch.process
    for _ in range(3):
        client.start_server()
    assert client.launch.process is first
    eventually(lambda: client.call("statistics"))


def test_two_executors_of_one_machine_have_their_own(executors: StartExecutor) -> None:
    one = executors()
    first = one.start(one.client())["pid"]
    two = executors()
    second = two.start(two.client())["pid"]
    assert first != second
    one.kill()
    eventually(lambda: not one.directory.exists())
    assert two.client().call("statistics")["pid"] == second
    assert two.directory.exists()


def test_killed_it_is_started_again_and_catches_up(
    executor: Executor, shards: Callable[..., Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = executor.client()
    first = executor.start(client)["pid"]
    shard = shards(executor, client)
    for i in range(3):
        shard.announce(shard.commit(i))
    counters(client)
    os.kill(first, signal.SIGKILL)
    assert client.launch.process is not None
    client.launch.process.wait()
    for i in range(3, 6):
        message = shard.commit(i)
        with pytest.raises(UnavailableError):
            shard.announce(message)
    monkeypatch.setattr(connection, "START_AGAIN_AFTER_MS", 0)
    assert executor.start(client)["pid"] != first
    shard.announce(shard.commit(6))
    assert counters(client)["dropped"] == 4
    assert [p.version for p in shard.backend.versions()] == [6, 7]


def test_it_ends_with_its_executor_and_takes_the_local_state_along(
    executor: Executor, shards: Callable[..., Shard]
) -> None:
    client = executor.client()
    executor.start(client)
    shards(executor, client).commit(0)
    assert client.launch.process is not None
    began = time.monotonic()
    executor.kill()
    assert client.launch.process.wait(PATIENCE_SECONDS) == 0
    assert time.monotonic() - began < 10
    assert not executor.directory.exists()
    assert f"executor {executor.id} has ended" in executor.log


def test_a_server_of_a_dead_executor_ends_at_once(executor: Executor) -> None:
    """A worker may outlive its executor by a moment."""
    client = executor.client()
    executor.kill()
    client.start_server()
    assert client.launch.process is not None
    assert client.launch.process.wait(PATIENCE_SECONDS) == 0
    assert not executor.directory.exists()


def test_what_executor_and_server_left_the_next_server_removes_and_reports(
    executors: StartExecutor, shards: Callable[..., Shard]
) -> None:
    dead = executors()
    client = dead.client()
    pid = dead.start(client)["pid"]
    shards(dead, client).commit(0)
    os.kill(pid, signal.SIGKILL)
    dead.kill()
    living = executors()
    living.start(living.client())
    eventually(lambda: not dead.directory.exists())
    eventually(lambda: "bytes that a dead executor left in" in living.log)
    assert str(dead.directory) in living.log
    assert local_dirs.log_path(dead.directory).exists(), "why it died may be in there"


def test_a_stale_socket_is_replaced(executor: Executor) -> None:
    """The file stays when a server is killed."""
    path = local_dirs.socket_path(executor.directory)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    client = executor.client()
    with pytest.raises(UnavailableError, match="see its log"):
        client.call("ping")
    executor.start(client)


def test_a_directory_with_a_long_name_has_its_socket_elsewhere(executors: StartExecutor, tmp_path: Path) -> None:
    executor = executors(tmp_path / ("x" * 120))
    path = local_dirs.socket_path(executor.directory)
    assert not path.is_relative_to(executor.directory)
    client = executor.client()
    executor.start(client)
    executor.kill()
    assert client.launch.process is not None
    client.launch.process.wait(PATIENCE_SECONDS)
    assert not path.exists()


def test_a_server_that_cannot_serve_ends_and_frees_the_lock(executor: Executor) -> None:
    """A process that holds the lock and does not listen would leave the executor without a server for good."""
    local_dirs.socket_path(executor.directory).mkdir()
    client = executor.client()
    client.start_server()
    assert client.launch.process is not None
    assert client.launch.process.wait(PATIENCE_SECONDS) == 1
    assert "the state server ends" in executor.log
    lock = local_dirs.take_lock(executor.directory)
    assert lock is not None
    os.close(lock)


def test_a_server_that_hangs_is_not_waited_for_again_and_again(executor: Executor) -> None:
    """A batch has a call for each shard: only the first may wait."""
    client = executor.client()
    pid = executor.start(client)["pid"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    try:
        with pytest.raises(UnavailableError):
            client.call("ping", timeout_seconds=0.2)
        assert client.has_just_timed_out
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: client.call("statistics"))["pid"] == pid


LIMIT_BYTES = 8 << 30
CAP_SYS_RESOURCE = 1 << 24
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Spark limits the address space on Linux only")


def may_lift_limits() -> bool:
    """Root may, but in most containers it may not."""
    (effective,) = re.findall(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(int(effective, 16) & CAP_SYS_RESOURCE)


@on_linux
@pytest.mark.parametrize("limited", ["worker", "executor and worker"])
def test_it_takes_the_executors_address_space_where_it_may(
    executors: StartExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limited: str
) -> None:
    """`spark.executor.pyspark.memory` is for workers; what limits the executor was set by whoever runs the machine."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -v {LIMIT_BYTES >> 10}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    limited_python = partial(monkeypatch.setattr, sys, "executable", str(python))
    if limited == "executor and worker":
        limited_python()
    executor = executors()
    limited_python()
    server = executor.start(executor.client())["pid"]
    is_lifted = limited == "worker" and may_lift_limits()
    expected = resource.RLIM_INFINITY if is_lifted else LIMIT_BYTES
    assert resource.prlimit(server, resource.RLIMIT_AS) == (expected, expected)
    is_told = "unset spark.executor.pyspark.memory" in executor.log
    assert is_told == (limited == "worker" and not is_lifted), "where the executor has that limit, unsetting it is vain"


@on_linux
def test_it_asks_for_the_executors_limit(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where this machine does not allow it: not for no limit at all."""
    asked: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *arguments: asked.append(arguments))
    subprocess.run(["prlimit", f"--as={LIMIT_BYTES}", "--pid", str(executor.id.pid)], check=True)
    state_server._take_memory_limit(executor.id)
    assert asked == [(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))]
