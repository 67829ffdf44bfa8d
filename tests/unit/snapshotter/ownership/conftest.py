"""An empty storage, and runs of a query that claim an operator's directory on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.run import TableSchema
from holdfast.snapshotter.ownership.claims import Claim, ClaimingRun, Claims, Tenure
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ObjectStorage]:
    with open_storage(str(tmp_path)) as opened:
        yield opened


TABLE = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
STARTED_MS = 1_795_287_600_000
STARTED = "2026-11-21T19:00:00Z"


def claimant(query: str = "q1", run: str = "r1", application: str | None = None, **changed: Any) -> Claim:
    """Return what a run says that has an application, a driver and an executor of its own."""
    application = f"app of {run}" if application is None else application
    me = ClaimingRun(run, STARTED_MS, 0, 0, 100, f"driver of {run}", f"executor of {run}")
    return Claim("totals", 0, query, f"name of {query}", application, "host-1", (replace(me, **changed),))


def claims_of(
    storage: ObjectStorage,
    me: Claim,
    lives: Mapping[str, bool] | None = None,
    monotonic_ms: Callable[[], int] = clock.monotonic_ms,
) -> Claims:
    """Return the claims of a run, which knows of these processes whether they live."""
    return Claims(storage, me, (lives or {}).get, monotonic_ms)


def record(query: str = "q1", run: str = "r1") -> OperatorRecord:
    return OperatorRecord("totals", query, f"def-{run}", run, 2, {"state": TABLE}, 100)


def take(storage: ObjectStorage, me: Claim | None = None, lives: Mapping[str, bool] | None = None) -> Tenure:
    """Claim."""
    me = me or claimant()
    return claims_of(storage, me, lives).take(record(me.query_id, me.holder.run_id), clock.now_ms())


def take_after(storage: ObjectStorage, run: str, earlier: str, query: str = "q1", **changed: Any) -> Tenure:
    """Claim for a run that knows that an earlier one's driver has ended."""
    return take(storage, claimant(query, run, **changed), {f"driver of {earlier}": False})


def begin(storage: ObjectStorage, query: str = "q1", run: str = "r1") -> Tenure:
    """Claim, and come to the first commit."""
    held = take(storage, claimant(query, run))
    declare_operator(storage, record(query, run))
    return held


def age(root: Path, milliseconds: int) -> None:
    """Let time pass for what was claimed so far."""
    for path in (root / "totals/claims").iterdir():
        seconds = path.stat().st_mtime - milliseconds / 1000
        os.utime(path, (seconds, seconds))


def keys(storage: ObjectStorage) -> list[str]:
    return [info.key for info in storage.list("totals/claims/")]


def everything(storage: ObjectStorage) -> dict[str, bytes]:
    return {info.key: bytes(storage.get(info.key)) for info in storage.list("")}


def asked(storage: ObjectStorage, before: Mapping[str, int]) -> dict[str, int]:
    """Return how often each kind of request was made since."""
    return {n: made for n in ("put", "get", "list", "delete") if (made := storage.requests[n] - before[n])}
