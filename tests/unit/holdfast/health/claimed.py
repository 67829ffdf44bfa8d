"""Claims of runs in a state directory, as executors of this machine or another one leave them."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from holdfast.backends import stored_file
from holdfast.snapshotter.ownership.claims import KIND, Claim, ClaimingRun
from holdfast.spark_integration.executor.processes import ProcessId, place_of

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
    """Write a claim that was stored at a time."""
    path = root / told.operator / "claims" / f"{told.number:020d}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(memoryview(stored_file.encode(KIND, asdict(told))[0]))
    os.utime(path, (seen_ms / 1000, seen_ms / 1000))
    return path
