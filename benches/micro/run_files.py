"""What must not grow with the shards of an executor, or with a shard's size. Run with ``make bench-micro``.

==================  ==================================================================================
commit_with_limit   a commit of one row to one of `shards` shards, where ``limit`` is set
freeze              freezing a version for a snapshot, once a commit has changed 1,000 of `ROWS` rows
==================  ==================================================================================
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.backends.run_files.memory import MemoryBackend
from holdfast.spark_integration.executor.local_dirs import choose_root

ROWS, CHANGED = 1_000_000, 1_000
_SCHEMA = TableSchema.of("state", pa.schema([("key", pa.int64())]), pa.schema([("text", pa.string())]))
_TABLES = {"state": _SCHEMA}
_SPREAD = np.uint64(11400714819323198485)
_LIMIT = {"limit": "1g"}


@pytest.fixture
def home() -> Iterator[Path]:
    """Return an empty directory in RAM."""
    made = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=choose_root(None, in_memory=True)))
    yield made
    shutil.rmtree(made)


def _run(ids: np.ndarray) -> Run:
    keys = Keys.of(_SCHEMA, ids.astype(np.uint64) * _SPREAD, pa.table({"key": ids}))
    return Run.build(_SCHEMA, keys, _SCHEMA.conform(pa.table({"text": [f"{i:060}" for i in ids]}), "value"))


@pytest.mark.parametrize("shards", [1, 200])
def test_commit_with_limit(benchmark: Any, home: Path, shards: int) -> None:
    """Commit to one of many shards."""
    row, numbers = _run(np.arange(1)), count(1)
    opened = [
        MemoryBackend(home / "memory" / "query" / "operator" / f"shard-{i:04}", _TABLES, clock.new_id, _LIMIT, home)
        for i in range(shards)
    ]
    for backend in opened:
        backend.apply(None, Pointer(1, "a"), {"state": row}, {})

    def commit() -> None:
        version = next(numbers)
        opened[0].apply(Pointer(version, "a"), Pointer(version + 1, "a"), {"state": row}, {})
        opened[0].drop([Pointer(version, "a")])

    benchmark.pedantic(commit, rounds=60, warmup_rounds=3)


def test_freeze(benchmark: Any, home: Path) -> None:
    """Freeze, as the state server does, what a worker has committed."""
    worker, server = (MemoryBackend(home / "shard", _TABLES, clock.new_id) for _ in range(2))
    worker.apply(None, Pointer(1, "a"), {"state": _run(np.arange(ROWS))}, {})
    server.freeze(Pointer(1, "a"))
    numbers = count(1)

    def committed() -> tuple[tuple[Pointer], dict[str, Any]]:
        version = next(numbers)
        new = Pointer(version + 1, "a")
        run = _run(np.arange(version * CHANGED, (version + 1) * CHANGED) % ROWS)
        worker.apply(Pointer(version, "a"), new, {"state": run}, {})
        worker.drop([Pointer(version, "a")])
        return (new,), {}

    benchmark.pedantic(server.freeze, setup=committed, rounds=40)
