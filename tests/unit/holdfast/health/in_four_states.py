"""State directories of one query in each state: running, stopped, stale and failing."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast import clock
from holdfast.snapshotter.ownership.claims import Claim, ClaimingRun
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.troubles import of_batch, report_trouble
from holdfast.spark_integration.executor.processes import ProcessId, place_of
from tests.model.shard_history import ShardHistory
from tests.unit.holdfast.commands.conftest import put_record

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
            folder = PrefixedStorage(storage, "totals/shard-0002")
            report_trouble(
                folder, of_batch(42), ValueError("could not convert string to float: 'n/a'"), 1, "host-1", now_ms
            )
    driver = {"stopped": ENDED, "stale": None}.get(state, THIS)
    claim(root, seen_ms, started_ms=seen_ms - 7_200_000, driver=driver)
    return root


THIS, ENDED = ProcessId.of(os.getpid()), ProcessId(1, 1)  # none of this machine began so early


def claim(
    root: Path,
    seen_ms: int,
    *,
    operator: str = "totals",
    query: str = "query-1",
    started_ms: int | None = None,
    batch_id: int | None = 42,
    driver: ProcessId | None = THIS,
) -> Path:
    """Write the claim of a run that was seen last at a time; without a driver it is one of another machine."""
    started_ms = seen_ms - 60_000 if started_ms is None else started_ms
    number = 1 + len([*(root / operator).glob("claims/*")])
    run = ClaimingRun(
        f"run-{started_ms}", started_ms, 0, batch_id, 100, place_of(driver) if driver else "", "elsewhere"
    )
    return put_claim(root, Claim(operator, number, query, None, "app-1", "host-1", (run,)), seen_ms)


def put_claim(root: Path, told: Claim, seen_ms: int) -> Path:
    path = root / told.operator / "claims" / f"{told.number:020d}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(memoryview(told.encode()))
    os.utime(path, (seen_ms / 1000, seen_ms / 1000))
    return path
