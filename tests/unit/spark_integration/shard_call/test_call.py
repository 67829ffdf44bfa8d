"""A call of a shard: what it leaves open."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.clock import new_id
from holdfast.mvcc import Transaction, VersionedStore
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.snapshots.snapshots import SnapshotPolicy
from holdfast.spark_integration.client.messages import ShardAddress
from holdfast.spark_integration.shard.operator import BatchTimes, Operator, ShardInput
from holdfast.spark_integration.shard.task import StreamingTask
from holdfast.spark_integration.shard_call import call
from holdfast.spark_integration.shard_call.store import ShardStore
from holdfast.spark_integration.spark_types import Watermark
from holdfast.testing.state_rows import COUNTS, keys_of, values_of

TABLES = {"counts": COUNTS}
STREAMING = StreamingTask("query", "run", True, 0, None)


class PlugIn(FilesystemBackend):
    """A backend that holds something until it is closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def count(batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
    transaction.put("counts", keys_of(COUNTS, [("ann",)]), values_of(COUNTS, [(1,)]))
    yield pa.RecordBatch.from_pydict({"n": [1]})
    return None


def fail(batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
    yield from ()
    raise ZeroDivisionError


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlugIn:
    """Return the backend of the shard that a call opens."""
    backend = PlugIn(tmp_path, TABLES, new_id)
    address = ShardAddress.of(tmp_path, "plug-in", {}, TABLES)
    tables, store = StoredTables.of_first_run(TABLES), VersionedStore(backend)
    shard = ShardStore(address, tmp_path, "totals/shard-0000", backend, None, None, tables, store, SnapshotPolicy(), 9)
    monkeypatch.setattr(call, "open_shard", lambda *_: shard)
    return backend


def attempt(run: Any) -> call._Attempt:
    operator: Any = SimpleNamespace(
        name="totals", shards=1, first_version=1, function=SimpleNamespace(run=run), settings=Settings()
    )
    none = pa.table({})
    batch = ShardInput("totals", 0, 0, none, none, pa.array([], pa.int64()), BatchTimes(0, None, None, None))
    return call._Attempt(operator, batch, STREAMING, None)


@pytest.mark.slow(1)
def test_it_closes_what_it_opens(opened: PlugIn) -> None:
    """A worker lives as long as its query: what a backend of somebody's own holds would add up, call by call."""
    calling = attempt(count)
    assert len(list(calling.run())) == 1
    assert opened.is_closed
    _, row, measures = calling.ended()
    assert row.pointer in opened.versions()
    assert measures.state_rows == 1


def test_one_that_fails_closes_it_too(opened: PlugIn) -> None:
    with pytest.raises(ZeroDivisionError):
        list(attempt(fail).run())
    assert opened.is_closed


def test_one_that_spark_drops_closes_it_too(opened: PlugIn) -> None:
    output = attempt(count).run()
    next(output)
    output.close()  # type: ignore[attr-defined]
    assert opened.is_closed


@pytest.mark.parametrize(("fires_by_watermark", "earliest_ms"), [(True, 4_400), (False, 5_000)])
def test_the_clock_of_an_operator_behind_a_join_is_behind_sparks(fires_by_watermark: bool, earliest_ms: int) -> None:
    """By as much as the join shows rows late: but only a timer of event time goes by that clock."""
    watermark = Watermark(1_000).later(600)
    function: Any = SimpleNamespace()
    operator = Operator("totals", new_id(), function, 1, [], [], [], watermark, Settings(), 1, fires_by_watermark)
    remembered = SimpleNamespace(earliest_timer_ms=5_000, batch_ms=1)
    group: Any = SimpleNamespace(batch_ms=2, watermark_ms=10_000, remembered=lambda: remembered)
    assert call._own_times(operator, group) == BatchTimes(2, 9_400, earliest_ms, 1)
