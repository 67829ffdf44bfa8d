"""The data source of a query's state without Spark."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run import TableSchema
from holdfast.spark_integration.executor import local_dirs, takeover
from holdfast.spark_integration.savepoints.restoring_shards import HashRange
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.state_source import source
from holdfast.spark_integration.state_source.options import Place
from holdfast.spark_integration.state_source.source import QueryTable, ShardPart, ShownTable, TableReader
from tests.faults.elsewhere import run_elsewhere

STATE = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
ROW = PointerRow("5d1f", "totals", 0, 1, Pointer(7, "aa"), None, None, 0)


def killed_reading(state_dir: Path, local: Path) -> None:
    os.environ["SPARK_LOCAL_DIRS"] = str(local)
    source.read_tables = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
    part = ShardPart(0, HashRange.of_shard(0, 1), "totals", ROW)
    held, names = {"totals": {"state": STATE}}, {"totals": {"n": "n"}}
    table = QueryTable(Place(str(state_dir), {}), held, names, STATE, ("user",), None, (part,))
    reader = TableReader(table, ShownTable.of(STATE), None, None)
    list(reader.read(reader.partitions()[0]))


@pytest.mark.slow(1)
def test_what_a_killed_task_read_goes(tmp_path: Path) -> None:
    """A shard's snapshot, as large as that is, stayed on the executor's disk for good."""
    local = tmp_path / "local"
    local.mkdir()
    (tmp_path / "state").mkdir()
    process = run_elsewhere(killed_reading, tmp_path / "state", local)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(local.rglob("*"))
    takeover.remove_dead_executors(local, clock.now_ms())
    assert list(local.rglob("*")) == [local_dirs.user_directory(local)]
