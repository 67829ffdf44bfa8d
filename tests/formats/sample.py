"""Writes the sample that every later release must open: ``python -m tests.formats.sample FOLDER``."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run import Keys, TableSchema
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import OperatorRecord, declare_operator
from holdfast.snapshotter.storage.opening import open_storage

OPERATOR, SHARD = "sample", "sample/shard-0000"
KEY = pa.schema([("user", pa.string()), ("amount", pa.float64())])
VALUE = pa.schema(
    [
        ("n", pa.int64()),
        ("price", pa.decimal128(10, 2)),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("city", pa.string()), ("code", pa.int32())])),
        ("raw", pa.binary()),
    ]
)
TABLES = {"state": TableSchema.of("state", KEY, VALUE)}
USERS = ["ann", None, "", "dan"]
AMOUNTS = [0.0, float("nan"), None, 2.5]
HASHES = np.array([7, 7, 2**63, 5], np.uint64)


def value(n: int) -> dict[str, object]:
    return {
        "n": n,
        "price": Decimal(n) / 4,
        "day": date(2026, 1, n),
        "at": datetime(2026, 1, n, 12, tzinfo=UTC),
        "tags": ["x" * n, None],
        "place": {"city": f"city {n}", "code": n},
        "raw": bytes([0, n]),
    }


def keys(rows: list[int]) -> Keys:
    table = pa.table([[USERS[r] for r in rows], [AMOUNTS[r] for r in rows]], schema=KEY)
    return Keys.of(TABLES["state"], HASHES[rows], table)


def write(folder: Path) -> Pointer:
    """Write an operator's directory: a snapshot, commits on it, a delete and an all-null value."""
    storage = open_storage(str(folder))
    declare_operator(storage, OperatorRecord(OPERATOR, "query", "definition", "run", 1, TABLES, 100))
    with tempfile.TemporaryDirectory() as local, ThreadPoolExecutor(2) as threads:
        backend = MemoryBackend(Path(local) / "shard", TABLES, clock.new_id)
        log = ObjectCommitLog(storage, SHARD, TABLES, threads, Path(local) / "shard", "memory")
        store = VersionedStore(backend, log)
        pointer = None
        for n, rows in enumerate([[0, 1, 2], [0, 3], [1]], start=1):
            with store.begin(pointer) as attempt:
                attempt.put("state", keys(rows), pa.Table.from_pylist([value(n)] * len(rows), schema=VALUE))
                if n == 3:
                    attempt.put("state", keys([2]), pa.Table.from_pylist([{}], schema=VALUE))
                    attempt.delete("state", keys([0]))
                pointer = attempt.commit()
            if n == 1 and pointer is not None:
                log.write_snapshot(backend, pointer)
    assert pointer is not None
    (folder / "pointer").write_text(f"{pointer}\n")
    return pointer


if __name__ == "__main__":
    write(Path(sys.argv[1]))
