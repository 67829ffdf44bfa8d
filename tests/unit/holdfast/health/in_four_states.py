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
