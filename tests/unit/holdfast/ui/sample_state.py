"""A state directory for the page: operators of many shards, unequal, with failures, leftovers and a sink."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.troubles import Troubles
from tests import sink_logs
from tests.model.shard_history import ShardHistory, TimedStorage
from tests.unit.holdfast.commands.conftest import put_record

QUERY = "0f1e2d3c-0000-4000-8000-000000000001"
HOSTILE = "<script>alert(1)</script>"


def make(root: Path, shards: int = 24) -> Path:
    """Write the directory, spread over three hours by the times of its files."""
    with open_storage(str(root)) as storage:
        put_record(storage, "totals", shards)
        put_record(storage, "sessions", 4)
        for shard in range(shards):
            history = ShardHistory(storage, f"totals/shard-{shard:04d}")
            # The third writes ten times as often; the fifth has no snapshot.
            history.grow(None, 60 if shard == 3 else 6 + shard % 5, 0 if shard == 5 else 3)
        for shard in range(3):
            ShardHistory(storage, f"sessions/shard-{shard:04d}").grow(None, 4, 2)
        told = Troubles(PrefixedStorage(storage, "totals/shard-0007"))
        told.report("snapshot", UnavailableError(f"no space left {HOSTILE}\x1b[31m"), 3, "host-1", 1_700_000_000_000)
        for batch_id in (7, 9):
            sink_logs.decide(storage, "invoices", QUERY, batch_id, {"gid": "a"}, {"gid": "b"}, rows=1_000)
        storage.put("totals/shard-0002/files/0123456789abcdef-0", b"left by an upload that nobody finished")
    spread(root)
    return root


def spread(root: Path, hours: float = 3.0) -> None:
    """Give the objects times, by the version in their names; parts follow their snapshots roughly."""
    end_s = 1_790_000_000.0
    for place, path in enumerate(sorted(p for p in root.rglob("*") if p.is_file())):
        version = path.name.partition("-")[0]
        part = int(version) / 60 if path.parent.name in ("commits", "snapshots") else (place * 7 % 60) / 60
        at = end_s - hours * 3600 * (1 - min(part, 1.0)) + (0.5 if path.parent.name == "snapshots" else 0.0)
        if path.parent.name == "troubles":
            at = end_s + 60
        os.utime(path, (at, at))


def make_huge(root: Path, shards: int, commits: int = 14, state_bytes: int = 1 << 20) -> Path:
    """Write an operator of many shards as a long-running query leaves it: commits, and a snapshot of every fourth.

    Parts are holes in the file system: they have their size, and take no room.
    """
    with open_storage(str(root)) as storage:
        put_record(storage, "totals", shards)
    history = ShardHistory(timed := TimedStorage(), "totals/shard-0000")
    history.grow(None, commits, snapshot_every=4)
    for shard in range(shards):
        folder = root / f"totals/shard-{shard:04d}"
        for key, (data, _) in timed.objects.items():
            path = folder / key.removeprefix("totals/shard-0000/")
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                # A manifest or commit names its shard; one of the same length is as good as its own for a listing.
                file.write(data.replace(b"totals/shard-0000", f"totals/shard-{shard:04d}"[:17].encode()))
                if path.parent.name == "files":
                    file.truncate(state_bytes // 6 * (3 if shard == 4321 else 1))
    return root
