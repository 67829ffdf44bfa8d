"""Good and bad messages to the state server, what is seen of them from outside, and the worker's side."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends.base import Pointer
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.backends.schema import encode_schemas
from holdfast.clock import new_id
from holdfast.errors import InvalidArgumentError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy
from holdfast.spark_integration.client import connection
from holdfast.spark_integration.client.connection import client_of
from holdfast.spark_integration.client.messages import ShardAddress
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.shard_call.announcing import announce
from holdfast.testing.state_rows import COUNTS
from tests.faults.executor_process import (
    Executor,
    eventually,
)
from tests.faults.state_server.shard import PREFIX, SECRET, Shard, counters, defined


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
