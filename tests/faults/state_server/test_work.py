"""What the state server does with commits: drops, merges, snapshots, clean-ups."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends.run_stack import COMMIT_MERGE_LIMIT_BYTES
from holdfast.errors import UnavailableError
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy
from holdfast.spark_integration.client.connection import client_of
from holdfast.spark_integration.client.messages import ShardAddress
from holdfast.spark_integration.shard_call.announcing import bound_chain
from tests.faults.executor_process import (
    Executor,
    eventually,
)
from tests.faults.state_server.shard import PREFIX, Shard, counters, defined


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
