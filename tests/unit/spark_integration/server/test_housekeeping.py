"""Work after commits goes on whatever the clock of the executor does, and waits for no other query."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from holdfast import clock
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.errors import NotFoundError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy
from holdfast.spark_integration.client.messages import Committed, ShardAddress
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.server import open_shards
from holdfast.spark_integration.server.durable_logs import DurableLogs
from holdfast.spark_integration.server.housekeeping import LEFTOVER_EVERY_MS, Housekeeping
from holdfast.spark_integration.server.open_shards import OpenShards
from holdfast.spark_integration.server.shard_use import ShardUse
from holdfast.testing.state_rows import COUNTS, TABLES, keys_of, values_of

DAY_MS = 86_400_000


def commit_to(shards: OpenShards, directory: Path) -> Committed:
    """Commit the first version of a shard, and return its announcement."""
    address = ShardAddress.of(directory, "memory", {}, TABLES)
    with shards.use(address) as backend, VersionedStore(backend).begin(None) as first:
        first.put("counts", keys_of(COUNTS, [("a",)], [1]), values_of(COUNTS, [(1,)]))
        pointer = first.commit()
    assert pointer is not None
    return Committed(address, None, pointer, "", None, {}, SnapshotPolicy(), 0)


def test_leftovers_go_although_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when it has caught up."""
    now_ms = [1_700_000_000_000]
    swept: list[int] = []

    def remove_leftovers(backend: MemoryBackend, before_ns: int) -> int:
        swept.append(now_ms[0])
        return 0

    monkeypatch.setattr(MemoryBackend, "remove_leftovers", remove_leftovers)
    root = local_dirs.private_directory(tmp_path / "executor")
    shards = OpenShards(root)
    keeping = Housekeeping(
        shards, DurableLogs(partial(ThreadPoolExecutor, 1)), ShardUse(), lambda _: None, lambda: now_ms[0]
    )
    message = commit_to(shards, root / "query" / "op" / "shard")
    for at_ms in (0, LEFTOVER_EVERY_MS - 1, LEFTOVER_EVERY_MS, -DAY_MS, LEFTOVER_EVERY_MS - DAY_MS):
        now_ms[0] = 1_700_000_000_000 + at_ms
        keeping.announce(message)
        keeping.queue.end()
        keeping.run()
    shards.close(1.0)
    assert [at - 1_700_000_000_000 for at in swept] == [0, LEFTOVER_EVERY_MS, -DAY_MS, LEFTOVER_EVERY_MS - DAY_MS]


def test_a_shard_that_a_restarted_query_uses_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run before has announced of it has waited for its turn; other shards would wait 30 s with it."""
    monkeypatch.setattr(open_shards, "REPLACE_WITHIN_SECONDS", 1.0)
    root = local_dirs.private_directory(tmp_path / "executor")
    shards = OpenShards(root)
    keeping = Housekeeping(shards, DurableLogs(partial(ThreadPoolExecutor, 1)), ShardUse(), lambda _: None)
    message = commit_to(shards, root / "query" / "op" / "shard")
    keeping.announce(message)
    keeping.queue.end()
    with shards.use(replace(message.shard, tables=ShardAddress.of("", "", {}, {"counts": COUNTS}).tables)):
        keeping.run()
    shards.close(1.0)
    assert keeping.counters["errors"] == 0


def test_of_two_announcements_the_newer_one_has_the_shard(tmp_path: Path) -> None:
    """The older one had its turn late, and opened the shard after the newer one, of a restarted query, had come."""
    shards = OpenShards(local_dirs.private_directory(tmp_path / "executor"))
    older = commit_to(shards, shards.root / "query" / "op" / "shard")
    shards.close(1.0)
    clock.sleep_ms(2)
    address = replace(older.shard, tables=ShardAddress.of("", "", {}, {"counts": COUNTS}).tables)
    newer = replace(older, shard=address, announced_ms=clock.monotonic_ms())
    clock.sleep_ms(2)
    with shards.use_announced(older):
        pass
    with shards.use_announced(newer) as backend:
        assert set(backend.tables) == {"counts"}
    shards.close(1.0)


def test_a_query_that_goes_back_to_its_columns_keeps_its_shard(tmp_path: Path) -> None:
    """It found the shard open as it wants it: what was announced of it with others in between is older."""
    shards = OpenShards(local_dirs.private_directory(tmp_path / "executor"))
    first = commit_to(shards, shards.root / "query" / "op" / "shard")
    clock.sleep_ms(2)
    address = replace(first.shard, tables=ShardAddress.of("", "", {}, {"counts": COUNTS}).tables)
    between = replace(first, shard=address, announced_ms=clock.monotonic_ms())
    clock.sleep_ms(2)
    with shards.use(first.shard):
        pass
    with pytest.raises(NotFoundError, match="meanwhile"), shards.use_announced(between):
        pass
    shards.close(1.0)
