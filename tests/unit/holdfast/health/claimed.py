"""Claims of runs in a state directory, as executors of this machine or another one leave them."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from holdfast.backends import stored_file
from holdfast.snapshotter.ownership.claim_listing import Claimant, claim_name
from holdfast.spark_integration.executor.processes import ProcessId, machine

ENDED = "1-1"  # no process of this machine began so early


def claim(
    root: Path,
    seen_ms: int,
    *,
    operator: str = "totals",
    query: str = "query-1",
    started_ms: int | None = None,
    batch_id: int | None = 42,
    process: str | None = None,
    on: str | None = None,
) -> Path:
    """Write the claim of a run that was seen last at a time: of this process, of another one, or on another machine."""
    started_ms = seen_ms - 60_000 if started_ms is None else started_ms
    me = Claimant(
        query,
        f"run-{started_ms}",
        None,
        "app-1",
        "host-1",
        on or machine(),
        process or str(ProcessId.of(os.getpid())),
        batch_id,
        100,
    )
    path = root / operator / "claims" / f"{claim_name(me, 1, started_ms)}.{seen_ms:016x}"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"operator": operator, **asdict(me), "started_ms": started_ms}
    path.write_bytes(memoryview(stored_file.encode("claim", header)[0]))
    os.utime(path, (seen_ms / 1000, seen_ms / 1000))
    return path
