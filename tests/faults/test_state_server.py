"""The state server as real processes: started on demand, killed, left behind, fed with garbage.

An executor is a child process that waits; a shard is an embedded store whose commits are announced as a worker does it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.backends.run_stack import COMMIT_MERGE_LIMIT_BYTES
from holdfast.backends.stored_schema import encode_schemas
from holdfast.clock import new_id
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.snapshots.policy import SnapshotPolicy
from holdfast.snapshotter.storage.object_storage import open_storage
from holdfast.spark_integration.client import launch
from holdfast.spark_integration.client.connection import StateClient, client_of
from holdfast.spark_integration.client.messages import Committed, ShardAddress
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.shard.announcing import announce, bound_chain
from holdfast.testing.state_rows import COUNTS, contents, keys_of, values_of
from tests.faults.executor_process import (
    PATIENCE_SECONDS,
    Executor,
    StartExecutor,
    eventually,
    started_executors,
)

PREFIX = "totals/shard-0000"
SECRET = "sEcReT-42"


@pytest.fixture
def executors(tmp_path: Path) -> Iterator[StartExecutor]:
    # tmp_path first: pytest's own directory must not lie in the temporary directory of these executors.
    with started_executors() as start:
        yield start


@pytest.fixture
def executor(executors: StartExecutor) -> Executor:
    return executors()


class Shard:
    """A shard of an executor; a commit is announced as `announce` does it."""

    def __init__(self, executor: Executor, client: StateClient, checkpoint_dir: str | None = None, **more: Any) -> None:
        self.directory = executor.directory / "query" / "totals" / "shard-0000"
        self.client = client
        self.tables = {"counts": COUNTS}
        self.backend = MemoryBackend(self.directory, self.tables, new_id)
        self.threads = ThreadPoolExecutor(2)
        log = None
        if checkpoint_dir is not None:
            log = ObjectCommitLog(
                open_storage(checkpoint_dir), PREFIX, self.tables, self.threads, self.directory, "memory"
            )
        self.store = VersionedStore(self.backend, log)
        self.checkpoint_dir = checkpoint_dir
        self.pointer: Pointer | None = None
        self.more = {"storage_options": {}, "policy": SnapshotPolicy(max_commits=3), "retained_versions": 100, **more}

    def commit(self, first: int, count: int = 1) -> Committed:
        """Commit users first … first + count and return the announcement."""
        accepted = self.pointer
        users = [(f"u{i}",) for i in range(first, first + count)]
        with self.store.begin(accepted) as transaction:
            transaction.put("counts", keys_of(COUNTS, users), values_of(COUNTS, [(first,)] * count))
            self.pointer = transaction.commit()
        return Committed(
            shard=ShardAddress.of(self.directory, "memory", {}, self.tables),
            accepted=accepted,
            committed=self.pointer,
            prefix=PREFIX,
            checkpoint_dir=self.checkpoint_dir,
            **self.more,
        )

    def announce(self, message: Committed) -> None:
        self.client.call("committed", message.encode())

    def state(self) -> dict[Any, Any]:
        assert self.pointer is not None
        with self.store.read_at(self.pointer) as view:
            return {key[0]: value[0] for key, value in contents(view, "counts").items()}


@pytest.fixture
def shards() -> Iterator[Callable[..., Shard]]:
    made: list[Shard] = []

    def make(*arguments: Any, **more: Any) -> Shard:
        made.append(Shard(*arguments, **more))
        return made[-1]

    yield make
    for shard in made:
        shard.threads.shutdown()


def counters(client: StateClient) -> dict[str, int]:
    """Return the counters when no work waits any more."""
    assert client.call("drain", b'{"timeout_seconds": 20.0}', 25.0) is True
    found: dict[str, int] = client.call("statistics")["counters"]
    return found


# One server for an executor


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


# Its work


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


def test_it_writes_snapshots_that_shorten_the_next_chain(
    executor: Executor, shards: Callable[..., Shard], tmp_path: Path
) -> None:
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


def test_a_storage_that_fails_is_counted_and_the_server_goes_on(
    executor: Executor, shards: Callable[..., Shard], tmp_path: Path
) -> None:
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


def test_it_deletes_what_no_version_needs_any_more(
    executor: Executor, shards: Callable[..., Shard], tmp_path: Path
) -> None:
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


def defined(**settings: Any) -> Any:
    """An operator's definition, as workers have it."""
    from holdfast.settings import Settings
    from holdfast.spark_integration.shard.operator import Operator
    from holdfast.spark_integration.vectorised.arrow_with_state import ArrowWithState

    types = pa.schema([("user", pa.string())])
    return Operator(
        name="totals",
        definition_id="def",
        function=ArrowWithState(lambda _: None, types, types, types),
        shards=1,
        key_columns=["user"],
        row_columns=["user"],
        key_names=["user"],
        has_watermark=False,
        timeout_conf="NoTimeout",
        settings=Settings(**settings),
    )


def operator_and_store(executor: Executor, shard: Shard, policy: SnapshotPolicy) -> tuple[Any, Any]:
    """What a worker has in hand during a shard call."""
    from holdfast.spark_integration.shard.store import ShardStore

    operator = defined(checkpoint_dir=shard.checkpoint_dir)
    address = ShardAddress.of(shard.directory, "memory", {}, shard.tables)
    log = shard.store._log
    return operator, ShardStore(address, executor.directory, PREFIX, shard.backend, log, None, shard.store, policy, 100)


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


# Its end


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
    monkeypatch.setattr(launch, "START_AGAIN_AFTER_MS", 0)
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


def test_it_ends_while_calls_wait(executor: Executor) -> None:
    client = executor.client()
    executor.start(client)
    other = executor.client()
    waiting = threading.Thread(
        target=lambda: _ignore_errors(lambda: other.call("drain", b'{"timeout_seconds": 0.5}', 5.0))
    )
    waiting.start()
    executor.kill()
    assert client.launch.process is not None
    assert client.launch.process.wait(PATIENCE_SECONDS) == 0
    waiting.join()


def _ignore_errors(call: Callable[[], object]) -> None:
    with suppress(UnavailableError):
        call()


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


# Bad input


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
        "checkpoint_dir": None,
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
        {"accepted": "1-aa", "committed": "2-bb", "checkpoint_dir": "pigeon://x"},
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


# The worker's side


def test_announcing_never_fails_a_batch(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is complete before: a full disk below the log must not undo it."""
    from holdfast.spark_integration.shard.store import ShardStore

    operator = defined()
    directory = executor.directory / "query" / "totals" / "shard-0000"
    backend = MemoryBackend(directory, {"counts": COUNTS}, new_id)
    shard = ShardAddress.of(directory, "memory", {}, {"counts": COUNTS})
    opened = ShardStore(
        shard, executor.directory, PREFIX, backend, None, None, VersionedStore(backend), SnapshotPolicy(), 100
    )
    logs = local_dirs.log_path(executor.directory).parent
    local_dirs.user_directory(Path(tempfile.gettempdir()))
    logs.write_text("in the way")
    accepted, committed = None, Pointer(1, "aa")
    assert not announce(operator, opened, accepted=accepted, committed=committed)
    logs.unlink()
    monkeypatch.setattr(launch, "START_AGAIN_AFTER_MS", 0)
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
