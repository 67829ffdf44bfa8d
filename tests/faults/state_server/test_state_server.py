"""A state server: how it begins and ends, what it is told, and what it does in the background."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.backends.run_stack import COMMIT_MERGE_LIMIT_BYTES
from holdfast.backends.schema import encode_schemas
from holdfast.clock import new_id
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.snapshots import SnapshotPolicy
from holdfast.spark_integration.client import connection
from holdfast.spark_integration.client.connection import client_of
from holdfast.spark_integration.client.messages import ShardAddress
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.server import state_server
from holdfast.spark_integration.shard_call.announcing import announce, bound_chain
from holdfast.testing.state_rows import COUNTS
from tests.faults.executor_process import PATIENCE_SECONDS, Executor, StartExecutor, eventually
from tests.faults.state_server.conftest import PREFIX, SECRET, Shard, counters, defined


def test_it_starts_on_demand_and_answers(executor: Executor) -> None:
    client = executor.client()
    with pytest.raises(UnavailableError, match="no state server is listening"):
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
    started = [c.process.pid for c in clients if c.process is not None]
    pids = [eventually(lambda c=client: c.call("statistics"))["pid"] for client in clients]
    assert pids == started * 3


def test_one_client_starts_one_server_at_a_time(executor: Executor) -> None:
    """Every batch of every shard asks while the first server is still on its way up."""
    client = executor.client()
    client.start_server()
    first = client.process
    for _ in range(3):
        client.start_server()
    assert client.process is first
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
    assert client.process is not None
    client.process.wait()
    for i in range(3, 6):
        message = shard.commit(i)
        with pytest.raises(UnavailableError):
            shard.announce(message)
    monkeypatch.setattr(connection, "START_AGAIN_AFTER_MS", 0)
    assert executor.start(client)["pid"] != first
    shard.announce(shard.commit(6))
    assert counters(client)["dropped"] == 4
    assert [p.version for p in shard.backend.versions()] == [6, 7]


def test_it_ends_with_its_executor_and_its_local_state(executor: Executor, shards: Callable[..., Shard]) -> None:
    client = executor.client()
    executor.start(client)
    shards(executor, client).commit(0)
    assert client.process is not None
    began = time.monotonic()
    executor.kill()
    assert client.process.wait(PATIENCE_SECONDS) == 0
    assert time.monotonic() - began < 10
    assert not executor.directory.exists()
    assert f"executor {executor.id} has ended" in executor.log


def test_a_server_of_a_dead_executor_ends_at_once(executor: Executor) -> None:
    """A worker may outlive its executor by a moment."""
    client = executor.client()
    executor.kill()
    client.start_server()
    assert client.process is not None
    assert client.process.wait(PATIENCE_SECONDS) == 0
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


def test_a_server_that_cannot_serve_ends_and_frees_the_lock(executor: Executor) -> None:
    """A process that holds the lock and does not listen would leave the executor without a server for good."""
    local_dirs.socket_path(executor.directory).mkdir()
    client = executor.client()
    client.start_server()
    assert client.process is not None
    assert client.process.wait(PATIENCE_SECONDS) == 1
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
    state_server._restore_memory_limit(executor.id)
    assert asked == [(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))]


def good_message(executor: Executor) -> dict[str, Any]:
    shard = {
        "directory": str(executor.directory / "query" / "totals" / "shard-0000"),
        "backend": "memory",
        "backend_options": {},
        "tables": encode_schemas({"counts": COUNTS}),
    }
    return {
        "shard": shard,
        "accepted": None,
        "committed": "1-aa",
        "prefix": PREFIX,
        "state_dir": None,
        "storage_options": {"secret": SECRET},
        "policy": {"max_commits": 3, "max_bytes": None, "interval_seconds": None},
        "retained_versions": 100,
    }


def test_garbage_gets_an_error_and_the_server_lives(executor: Executor) -> None:
    client = executor.client()
    pid = executor.start(client)["pid"]
    message = good_message(executor)
    shard = message["shard"]
    garbage = [b"", b"\xff", b"[]", b"{}", b"3", b"[" * 100_000]
    garbage += [json.dumps({**message, name: 7.5}).encode() for name in message]
    garbage += [json.dumps({**message, "shard": {**shard, name: 7.5}}).encode() for name in shard]
    garbage += [json.dumps({**message, "accepted": "../.."}).encode()]
    for body in garbage:
        with pytest.raises(InvalidArgumentError):
            client.call("committed", body)
    for action, body in (("no such action", b"{}"), ("drain", b"soon"), ("drain", b"")):
        with pytest.raises(InvalidArgumentError):
            client.call(action, body)
    assert counters(client)["announced"] == 0
    # Well-formed, but naming things that are not there: found out later, counted, never fatal.
    for change in (
        {"shard": {**shard, "backend": "pigeon"}},
        {"shard": {**shard, "tables": {"counts": ["AAAA", "AAAA"]}}},
        {"shard": {**shard, "directory": str(executor.root)}},
        {"accepted": "1-aa", "committed": "2-bb", "state_dir": "pigeon://x"},
    ):
        client.call("committed", json.dumps({**message, **change}).encode())
        done = counters(client)
    assert (done["errors"], done["snapshot_errors"]) == (3, 1)
    client.call("committed", json.dumps(message).encode())
    assert counters(client)["errors"] == 3, "a version that is gone is no error"
    assert client.call("statistics")["pid"] == pid
    assert SECRET not in executor.log


def test_no_credential_is_seen_from_outside(
    executor: Executor, shards: Callable[..., Shard], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In no log, argument list, environment or text of a message; nor in any file."""
    client = executor.client()
    pid = executor.start(client)["pid"]
    shard = shards(executor, client, str(tmp_path / "durable"), storage_options={"key": "k", "secret": SECRET})
    messages = [shard.commit(i) for i in range(5)]
    (tmp_path / "durable").rename(tmp_path / "away")
    (tmp_path / "durable").write_text("in the way")
    shard.announce(messages[-1])
    assert counters(client)["snapshot_errors"] == 1
    shown = [
        repr(messages[-1]),
        str(messages[-1]),
        f"{messages[-1]}",
        executor.log,
        caplog.text,
        str(client.call("statistics")),
    ]
    assert SECRET not in "".join(shown)
    for name in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    for path in [*executor.root.rglob("*"), *tmp_path.rglob("*")]:
        if path.is_file() and not path.is_socket():
            assert SECRET.encode() not in path.read_bytes()


def test_the_log_lies_where_the_documentation_says(executor: Executor) -> None:
    executor.start(executor.client())
    logs = Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}" / "logs"
    (path,) = logs.glob(f"state-server-executor-{executor.id}.*.log")
    assert "serving executor" in path.read_text()
    assert path.parent.stat().st_mode & 0o077 == 0


def test_announcing_never_fails_a_batch(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is complete before: a full disk below the log must not undo it."""
    from holdfast.spark_integration.shard_call.store import ShardStore

    operator = defined()
    directory = executor.directory / "query" / "totals" / "shard-0000"
    backend = MemoryBackend(directory, {"counts": COUNTS}, new_id)
    shard = ShardAddress.of(directory, "memory", {}, {"counts": COUNTS})
    tables = StoredTables.of_first_run({"counts": COUNTS})
    opened = ShardStore(
        shard, executor.directory, PREFIX, backend, None, None, tables, VersionedStore(backend), SnapshotPolicy(), 100
    )
    logs = local_dirs.log_path(executor.directory).parent
    local_dirs.user_directory(Path(tempfile.gettempdir()))
    logs.write_text("in the way")
    accepted, committed = None, Pointer(1, "aa")
    assert not announce(operator, opened, accepted=accepted, committed=committed)
    logs.unlink()
    monkeypatch.setattr(connection, "START_AGAIN_AFTER_MS", 0)
    executor.clients.append(client_of(executor.directory))
    assert not announce(operator, opened, accepted=accepted, committed=committed)
    eventually(lambda: announce(operator, opened, accepted=accepted, committed=committed))
    assert counters(executor.clients[0])["announced"] == 1


def test_a_forked_worker_has_a_client_of_its_own(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections must not be shared between processes."""
    mine = client_of(executor.directory)
    assert client_of(executor.directory) is mine
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    assert client_of(executor.directory) is not mine


def test_it_drops_versions_that_the_query_has_left_behind(executor: Executor, shards: Callable[..., Shard]) -> None:
    client = executor.client()
    executor.start(client)
    shard = shards(executor, client)
    for i in range(6):
        shard.announce(shard.commit(i))
        done = counters(client)
    assert done["dropped"] == 4
    assert [p.version for p in shard.backend.versions()] == [5, 6]
    assert shard.state() == {f"u{i}": i for i in range(6)}
    (statistics,) = client.call("statistics")["shards"].values()
    assert statistics["versions"] == 2
    assert statistics["rows"] == {"counts": 6}
    assert done | {"announced": 6, "errors": 0} == done


def test_it_merges_what_commits_leave_because_it_is_large(
    executor: Executor, shards: Callable[..., Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = executor.client()
    executor.start(client)
    shard = shards(executor, client)
    monkeypatch.setattr("holdfast.backends.run_files.backend.COMMIT_MERGE_LIMIT_BYTES", 0)
    shard.commit(0, 50)
    message = shard.commit(50, 50)
    assert COMMIT_MERGE_LIMIT_BYTES > 0
    assert shard.backend.statistics().runs == {"counts": 2}
    shard.announce(message)
    assert counters(client)["merged"] == 1
    shard.commit(100)
    assert shard.backend.statistics().runs == {"counts": 2}, "the next commit takes the merged run, and adds its own"
    assert len(shard.state()) == 101


def test_snapshots_shorten_the_next_chain(executor: Executor, shards: Callable[..., Shard], tmp_path: Path) -> None:
    client = executor.client()
    executor.start(client)
    shard = shards(executor, client, str(tmp_path / "durable"))
    for i in range(12):
        shard.announce(shard.commit(i))
        done = counters(client)
    assert done["snapshots"] == 4
    assert done["errors"] == 0
    assert shard.pointer is not None
    with shard.store.read_at(shard.pointer) as view:
        chain = Lineage.of(view.properties).chain
    assert chain[0].kind == "snapshot"
    assert len(chain) <= 5
    shutil.rmtree(shard.directory / "versions")
    assert shard.state() == {f"u{i}": i for i in range(12)}


def test_a_failing_storage_is_counted(executor: Executor, shards: Callable[..., Shard], tmp_path: Path) -> None:
    client = executor.client()
    pid = executor.start(client)["pid"]
    shard = shards(executor, client, str(tmp_path / "durable"))
    messages = [shard.commit(i) for i in range(6)]
    (tmp_path / "durable").rename(tmp_path / "away")
    (tmp_path / "durable").write_text("in the way")
    shard.announce(messages[-1])
    assert counters(client)["snapshot_errors"] == 1
    assert "in the way" not in str(client.call("statistics")["snapshot_errors"])
    assert str(tmp_path / "durable") in str(client.call("statistics")["snapshot_errors"])
    (tmp_path / "durable").unlink()
    (tmp_path / "away").rename(tmp_path / "durable")

    def announced_again() -> bool:
        shard.announce(messages[-1])
        return counters(client)["snapshots"] == 1

    eventually(announced_again)
    assert counters(client)["snapshot_errors"] == 1, "a while passes before it is tried again"
    statistics = client.call("statistics")
    assert (statistics["pid"], statistics["snapshot_errors"]) == (pid, {})
    assert "no snapshot for" in executor.log


def test_it_deletes_what_no_version_needs(executor: Executor, shards: Callable[..., Shard], tmp_path: Path) -> None:
    """Commits and snapshots from before the horizon, and the files that only those had."""
    client = executor.client()
    executor.start(client)
    shard = shards(executor, client, str(tmp_path / "durable"), retained_versions=5)
    objects = tmp_path / "durable" / PREFIX
    for i in range(60):
        message = shard.commit(i)
        # Older than the grace period.
        for path in objects.rglob("*-*"):
            os.utime(path, (1e9, 1e9))
        shard.announce(message)
        done = counters(client)
    assert done["clean_up_errors"] == done["snapshot_errors"] == 0
    assert done["clean_ups"] >= 3
    assert done["deleted_objects"] > 20
    assert len(list((objects / "commits").iterdir())) < 30
    assert len(list((objects / "snapshots").iterdir())) < 10
    shutil.rmtree(shard.directory / "versions")
    assert shard.state() == {f"u{i}": i for i in range(60)}


def operator_and_store(executor: Executor, shard: Shard, policy: SnapshotPolicy) -> tuple[Any, Any]:
    """What a worker has in hand during a shard call."""
    from holdfast.spark_integration.shard_call.store import ShardStore

    operator = defined(state_dir=shard.state_dir)
    address = ShardAddress.of(shard.directory, "memory", {}, shard.tables)
    log = shard.store._log
    tables = StoredTables.of_first_run(shard.tables)
    opened = ShardStore(address, executor.directory, PREFIX, shard.backend, log, None, tables, shard.store, policy, 100)
    return operator, opened


def test_a_worker_waits_for_a_snapshot_where_the_chain_is_too_long(
    executor: Executor, shards: Callable[..., Shard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the chain stays bounded though no announcement was ever heard."""
    shard = shards(executor, executor.client(), str(tmp_path / "durable"))
    executor.clients.append(client_of(executor.directory))
    operator, opened = operator_and_store(executor, shard, SnapshotPolicy(max_commits=2))
    longest = 0
    for i in range(20):
        shard.commit(i)
        with shard.store.read_at(shard.pointer) as view:
            bound_chain(operator, opened, shard.pointer, view)
            longest = max(longest, len(Lineage.of(view.properties).commits))
    assert longest == 8
    assert shard.state() == {f"u{i}": i for i in range(20)}


def test_where_no_snapshot_can_be_written_commits_go_on_for_a_while(
    executor: Executor,
    shards: Callable[..., Shard],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Backpressure first, which says so; then an error, before a restore would take for ever."""
    shard = shards(executor, executor.client(), str(tmp_path / "durable"))
    executor.clients.append(client_of(executor.directory))
    operator, opened = operator_and_store(executor, shard, SnapshotPolicy(max_commits=1))
    shard.commit(0)
    # In the way of what a snapshot stores, and of nothing else.
    (tmp_path / "durable" / PREFIX / "files").write_text("")
    for i in range(1, 16):
        with shard.store.read_at(shard.pointer) as view:
            bound_chain(operator, opened, shard.pointer, view)
        shard.commit(i)
    with (
        shard.store.read_at(shard.pointer) as view,
        pytest.raises(UnavailableError, match="no snapshot can be written, and 16 commits"),
    ):
        bound_chain(operator, opened, shard.pointer, view)
    assert "waits for a snapshot: 4 commits since the last one" in caplog.text
    (tmp_path / "durable" / PREFIX / "files").unlink()
    with shard.store.read_at(shard.pointer) as view:
        bound_chain(operator, opened, shard.pointer, view)
    shard.commit(99)
    with shard.store.read_at(shard.pointer) as view:
        assert len(Lineage.of(view.properties).chain) == 2, "a snapshot and a commit"
