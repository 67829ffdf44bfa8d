"""Timers and rows that expire come and go for ever: what is gone leaves nothing behind, on any backend."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from holdfast.backends.registry import backend_names, find_backend
from holdfast.spark_integration.vectorised.arrow_with_state import StateColumns
from holdfast.spark_integration.vectorised.batch import ShardBatch
from tests.tiers import LONG, repetitions
from tests.unit.spark_integration.vectorised.operator_shard import COUNT, OperatorShard

pytestmark = [pytest.mark.all, pytest.mark.slow(8)]

USERS, TTL_MS = 50, 5_000
MICRO_BATCHES = repetitions(120, 20_000)


def move(batch: ShardBatch) -> None:
    """Refresh each user's row, put its timer off, and delete that of every third one."""
    batch.state.put(n=pc.add(pc.coalesce(batch.state.get()["n"], 0), 1))
    has_rows = pc.greater(batch.groups.count(), 0)
    batch.timers.set([batch.processing_ms + 4_000] * batch.keys.num_rows, where=has_rows)
    batch.timers.delete(where=pa.array([user % 3 == 0 for user in map(int, batch.keys["user"].to_pylist())]))


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.timeout(3600 if LONG else 300)
def test_the_state_is_as_large_as_what_lives(tmp_path: Path, backend: str) -> None:
    """However many micro-batches: rows stored in all runs, deletes included, and bytes."""
    states = {"state": StateColumns(COUNT, TTL_MS)}
    shard = OperatorShard(tmp_path, states, "ProcessingTime", find_backend(backend))
    with shard.backend:
        for n in MICRO_BATCHES:
            shard.run([str((n * 3 + i) % USERS) for i in range(5)], 100 * n, move)
            if n % 20 == 19:
                shard.maintain()
                found = shard.backend.statistics()
                assert sum(found.rows.values()) <= 4 * USERS * 4, "four tables, and some deletes"
                assert found.local_bytes < 2_000_000
        shard.run([], 100 * len(MICRO_BATCHES) + 2 * TTL_MS, lambda batch: None)
        for table in ("state", "state.expiring", "timers", "timers_by_due"):
            assert shard.stored(table) == []
        assert shard.earliest_ms is None
