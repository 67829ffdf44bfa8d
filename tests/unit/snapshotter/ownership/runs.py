"""Runs of queries that claim an operator's directory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.backends.run import TableSchema
from holdfast.snapshotter.ownership.claim_listing import Claimant
from holdfast.snapshotter.ownership.claims import Claims, Tenure
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.storage.object_storage import ObjectStorage

TABLE = TableSchema.of("state", pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))


STARTED_MS = 1_795_287_600_000
STARTED = "2026-11-21T19:00:00Z"


_numbers = itertools.count()


def claimant(query: str = "q1", run: str = "r1", **changed: Any) -> Claimant:
    """Return a run that has an application and an executor of its own, on one machine."""
    me = Claimant(query, run, f"name of {query}", f"app of {run}", "host-1", "machine-1", f"{int(run[1:])}-1", 0, 100)
    return replace(me, **changed)


def claims_of(storage: ObjectStorage, me: Claimant, alive: Collection[str] = ()) -> Claims:
    """Return the claims of a run; of other executors on its machine only those of `alive` still run."""
    new_id = lambda: f"{next(_numbers):016x}"  # noqa: E731
    return Claims(storage, "totals", me, set(alive).intersection, new_id=new_id, now_ms=lambda: STARTED_MS)


def claims(storage: ObjectStorage, query: str = "q1", run: str = "r1") -> Claims:
    return claims_of(storage, claimant(query, run))


def record(query: str = "q1", run: str = "r1") -> OperatorRecord:
    return OperatorRecord.of("totals", query, f"def-{run}", run, 2, {"state": TABLE}, 100)


def take(storage: ObjectStorage, query: str = "q1", run: str = "r1") -> Tenure:
    return claims(storage, query, run).take(record(query, run))


def begin(storage: ObjectStorage, query: str = "q1", run: str = "r1") -> Tenure:
    """Claim, and come to the first commit."""
    held = take(storage, query, run)
    declare_operator(storage, record(query, run))
    return held


def age(root: Path, milliseconds: int, pattern: str = "*") -> None:
    """Let time pass for what was claimed so far."""
    for path in (root / "totals/claims").glob(pattern):
        seconds = path.stat().st_mtime - milliseconds / 1000
        os.utime(path, (seconds, seconds))


def keys(storage: ObjectStorage, run: str = "") -> list[str]:
    return [info.key for info in storage.list("totals/claims/") if f".{run}." in info.key or not run]


def everything(storage: ObjectStorage) -> dict[str, bytes]:
    return {info.key: bytes(storage.get(info.key)) for info in storage.list("")}


def take_of(taking: Claims, run: str = "r2") -> Tenure:
    return taking.take(record(run=run))
