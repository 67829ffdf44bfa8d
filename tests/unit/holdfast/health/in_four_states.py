"""State directories of one query in each state: running, stopped, stale and failing."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast import clock
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.troubles import Troubles, of_batch
from tests.model.shard_history import ShardHistory
from tests.unit.holdfast.commands.state_dir import put_record
from tests.unit.holdfast.health.claimed import ENDED, THIS, claim

DAY_MS = 24 * 60 * 60_000
STATES = ("running", "stopped", "stale", "failing")


def make(root: Path, state: str, shards: int = 4) -> Path:
    """Write the directory of a query that is in a state now."""
    now_ms = clock.now_ms()
    with open_storage(str(root)) as storage:
        put_record(storage, "totals", shards)
        for shard in range(shards):
            ShardHistory(storage, f"totals/shard-{shard:04d}").grow(None, 8, 0 if shard == 0 else 3)
    seen_ms = now_ms - (67 * DAY_MS if state == "stale" else 40_000)
    for path in (path for path in root.rglob("*") if path.is_file()):
        os.utime(path, (seen_ms / 1000 - 10, seen_ms / 1000 - 10))
    if state == "failing":
        with open_storage(str(root)) as storage:
            told = Troubles(PrefixedStorage(storage, "totals/shard-0002"))
            told.tell(of_batch(42), ValueError("could not convert string to float: 'n/a'"), 1, "host-1", now_ms)
    driver = {"stopped": ENDED, "stale": None}.get(state, THIS)
    claim(root, seen_ms, started_ms=seen_ms - 7_200_000, driver=driver)
    return root


def log(location: Path, planned_ms: int, batches: range) -> Path:
    """Write Spark's log of micro-batches that took two of every ten seconds, the last one planned at a time."""
    for folder in ("offsets", "commits"):
        (location / folder).mkdir(parents=True)
    (location / "metadata").write_text('{"id": "query-1"}')
    for number in batches:
        for folder, after_s in (("offsets", 0), ("commits", 2)):
            path = location / folder / str(number)
            path.write_text("v1\n{}")
            os.utime(path, (planned_ms / 1000 - 10 * (batches[-1] - number) + after_s,) * 2)
    return location
