"""Workers and servers that are killed or do not start, and what is there afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends.base import Pointer
from holdfast.clock import new_id
from holdfast.errors import (
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from holdfast.spark_integration.client import connection
from holdfast.spark_integration.client import streams as state_streams
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.exchange import Exchange
from holdfast.spark_integration.client.messages import ServerLostError, ShardAddress
from holdfast.spark_integration.client.remote_backend import RemoteBackend
from holdfast.spark_integration.executor import local_dirs, server_files
from holdfast.testing import MakeBackend
from holdfast.testing.state_rows import P1, P2, contents, counts, users
from tests.faults.executor_process import (
    Executor,
    StartExecutor,
    eventually,
)
from tests.faults.remote_backend.rows import TABLES, encoded, exchanged, kill, many, server_of

pytestmark = pytest.mark.slow


HOLDER = """
import sys
from pathlib import Path
from holdfast.backends.base import Pointer
from holdfast.spark_integration.client.remote_backend import RemoteBackend
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.messages import ShardAddress
shard = ShardAddress(**__import__("json").loads(sys.argv[2]))
backend = RemoteBackend(StateClient(Path(sys.argv[1])), shard, shard.schemas(), lambda: "x")
views = [backend.view(Pointer.parse(sys.argv[3])) for _ in range(3)]
scans = [view.scan("counts") for view in views]
for scan in scans:
    next(scan)
print("holds", flush=True)
sys.stdin.read()
"""


def test_a_killed_worker_leaves_no_view_open(backend: RemoteBackend, client: StateClient, executor: Executor) -> None:
    """A view holds a snapshot of the database: one for each killed worker would keep all old rows for ever."""
    backend.apply(None, P1, {"counts": many(200_000)[1]}, {})
    shard = json.dumps(vars(backend._shard))
    command = [sys.executable, "-c", HOLDER, str(executor.directory), shard, str(P1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"holds\n"
        assert client.call("statistics")["views"] == 3
        worker.kill()
    eventually(lambda: client.call("statistics")["views"] == 0)
    backend.apply(P1, P2, counts(("ann", 1)), {})


def test_a_scan_of_a_server_that_hangs_ends(
    backend: RemoteBackend, client: StateClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the task would wait for ever: a scan has no time limit of its own."""
    for name in ("keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms"):
        monkeypatch.setitem(connection._CHANNEL, f"grpc.{name}", 1_000)
    # 40 MB: what is on its way already ends no scan, however long the worker waits before it reads on.
    backend.apply(None, P1, {"counts": many(200_000, "user" * 50)[1]}, {})
    pid = client.call("statistics")["pid"]
    backend._client.close()  # the next call opens another connection
    with backend.view(P1) as view:
        scan = view.scan("counts")
        next(scan)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(ServerLostError):
                list(scan)
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("ask", ["apply", "load"])
def test_a_commit_that_did_not_arrive_whole_makes_nothing(
    backend: RemoteBackend, client: StateClient, ask: str
) -> None:
    """Whether the worker was killed or only ends too early: the server sees the same end."""
    backend.apply(None, P1, counts(("ann", 1)), {})
    data = encoded(many(1000)[1])
    message = {"ask": ask, "shard": vars(backend._shard), "sizes": {"counts": data.size}, "properties": {}}
    message |= {"base": str(P1), "new": str(P2)} if ask == "apply" else {"pointer": str(P2)}
    with Exchange(client, message, 10) as exchange:
        exchange.send(state_streams.byte_slices([data.slice(0, data.size - 1)]), state_streams.BYTES)
        with pytest.raises(UnavailableError, match="whole commit arrived"):
            exchange.answer()
    with Exchange(client, message, 10) as exchange:
        exchange._writer.begin(state_streams.BYTES)
        exchange._writer.write_batch(next(state_streams.byte_slices([data.slice(0, 1000)])))
    for wrong in (
        {**message, "sizes": {"counts": data.size - 1}},
        {**message, "sizes": {"counts": "7"}},
        {**message, "sizes": {"counts": -1}},
        {**message, "sizes": {}},
    ):
        with pytest.raises(InvalidArgumentError):
            exchanged(client, wrong, state_streams.byte_slices([data]), state_streams.BYTES)
    assert backend.versions() == [P1]
    with backend.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (1,)}


@pytest.mark.parametrize("make", ["rocksdb"], indirect=True)
def test_a_killed_server_is_said_to_be_lost_and_another_starts(
    backend: RemoteBackend, client: StateClient, executor: Executor
) -> None:
    """Whatever the worker does at that moment: the error names the log, and the next beginning finds a server."""
    keys, run = many(100_000)
    asked: list[Callable[[Any], object]] = [
        lambda v: v.get("counts", keys),
        lambda v: list(v.scan("counts")),
        lambda v: list(v.scan_prefix("counts", keys)),
        lambda _: backend.apply(P1, Pointer(2, new_id()), {"counts": run}, {}),
        lambda _: backend.versions(),
    ]
    for number, ask in enumerate(asked):
        backend.load(P1, {"counts": run}, {})
        view = backend.view(P1)
        pid = server_of(client)
        timer = threading.Timer(0.01 * number, os.kill, (pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(ServerLostError, match=str(server_files.log_path(executor.directory))):
            _until_it_fails(ask, view)
        timer.join()
        view.close()
        client.require_server()
        assert server_of(client) != pid
        with pytest.raises(ServerLostError, match="another runs now"):
            _reopened(view).get("counts", keys)


def _until_it_fails(ask: Callable[[Any], object], view: Any) -> None:
    while True:
        ask(view)


def _reopened(view: Any) -> Any:
    """Return a view of a server that has ended, as a worker has it that did not notice."""
    view._exchange = object()
    return view


def test_a_server_that_was_killed_holds_nothing_but_what_its_files_hold(make: MakeBackend, tmp_path: Path) -> None:
    """Honest: what is not there any more is not found, and never empty."""
    backend = make(tmp_path, TABLES)
    assert isinstance(backend, RemoteBackend)
    backend.apply(None, P1, counts(("ann", 1)), {"step": 1})
    kill(backend._client)
    again = make(tmp_path, TABLES)
    for pointer in [P1] if P1 not in again.versions() else []:
        with pytest.raises(NotFoundError):
            again.view(pointer)
        again.load(P1, counts(("ann", 1)), {"step": 1})
    with again.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (1,)}
        assert view.properties == {"step": 1}


def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log(executors: StartExecutor) -> None:
    executor = executors()
    server_files.socket_path(executor.directory).mkdir()
    with pytest.raises(UnavailableError, match=r"(?s)does not start.*its log ends with.*Traceback.*Error.*log=.*\.log"):
        executor.client().require_server()


def test_long_local_directories_of_one_executor_have_a_server_each(executors: StartExecutor) -> None:
    """One in RAM and one on disk, or of two queries; their sockets lie in one place, since their own have no room."""
    executor = executors()
    long = [executor.root / f"{name}-{'x' * 100}" for name in ("ram", "disk")]
    clients = [StateClient(local_dirs.executor_directory(root, executor.id)) for root in long]
    executor.clients += clients
    for client in clients:
        client.require_server()
    pids = [client.call("statistics")["pid"] for client in clients]
    assert len(set(pids)) == 2
    for client, pid in zip(clients, pids, strict=True):
        client.close()
        assert client.call("statistics")["pid"] == pid, "it is reached as before, also by a new connection"


def test_a_server_that_never_answers_is_waited_for_a_bounded_time(executors: StartExecutor) -> None:
    executor = executors()
    lock = server_files.take_lock(executor.directory)
    assert lock is not None
    client = executor.client()
    with pytest.raises(UnavailableError, match="does not start"):
        client.require_server(within_seconds=0.3)
    assert client.launch.process is None, "somebody holds the lock: a second one must not be started"
    os.close(lock)
    client.require_server()


def test_what_was_committed_survives_the_end_of_the_executor(executors: StartExecutor, tmp_path: Path) -> None:
    """The server closes its shards, and the next executor's server takes their directories over."""
    versions: list[list[Pointer]] = []
    for _ in range(2):
        executor = executors()
        client = executor.client()
        directory = executor.directory / "disk" / "query" / "totals" / "shard-0000"
        shard = ShardAddress.of(directory, "rocksdb", {}, TABLES)
        client.require_server()
        backend = RemoteBackend(client, shard, TABLES, new_id)
        versions.append(backend.versions())
        if not versions[-1]:
            backend.apply(None, P1, counts(("ann", 1)), {})
            backend.apply(P1, P2, counts(("bob", 2)), {})
            backend.drop([P1])
            process = client.launch.process
            assert process is not None
            executor.kill()
            assert process.wait(30) == 0
    assert versions == [[], [P2]]
    with backend.view(P2) as view:
        assert contents(view, "counts") == {("ann",): (1,), ("bob",): (2,)}


def test_the_server_does_without_pandas(backend: RemoteBackend, client: StateClient) -> None:
    """pyarrow would load it: 57 MB of a budget of memory, and a second before the first answer."""
    backend.apply(None, P1, counts(("ann", 1)), {})
    with backend.view(P1) as view:
        assert users(view, "ann") == [(1,)]
    pid = server_of(client)
    assert "pandas" not in Path(f"/proc/{pid}/maps").read_text()


def test_files_of_the_server_are_private(backend: RemoteBackend, executor: Executor) -> None:
    backend.apply(None, P1, {"counts": many(1000)[1]}, {})
    backend.freeze(P1)
    open_to_others = [p for p in executor.root.rglob("*") if not p.is_symlink() and p.lstat().st_mode & 0o077]
    assert open_to_others == []
