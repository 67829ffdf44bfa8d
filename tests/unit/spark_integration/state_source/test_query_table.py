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
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.stored_reads import ReadDirectory, ReadShard, StoredRead, store_read
from holdfast.spark_integration.executor import local_dirs, takeover
from holdfast.spark_integration.state_source import query_table
from holdfast.spark_integration.state_source.source import StateSource
from tests.faults.elsewhere import run_elsewhere

STATE = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
READ = StoredRead(
    "totals",
    {"totals": ReadDirectory(1, StoredTables.of_first_run({"state": STATE}))},
    (ReadShard("totals", 0, Pointer(7, "aa"), None),),
)


def killed_reading(state_dir: Path, local: Path, read_id: str) -> None:
    os.environ["SPARK_LOCAL_DIRS"] = str(local)
    query_table.read_tables = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
    source = StateSource({"path": str(state_dir), "operator": "totals", "read": read_id})
    reader = source.reader(source.schema())
    list(reader.read(reader.partitions()[0]))


@pytest.mark.slow(1)
def test_what_a_killed_task_read_goes(tmp_path: Path) -> None:
    """A shard's snapshot, as large as that is, stayed on the executor's disk for good."""
    local = tmp_path / "local"
    local.mkdir()
    with open_storage(str(tmp_path / "state")) as storage:
        read_id = store_read(storage, "totals", READ)
    process = run_elsewhere(killed_reading, tmp_path / "state", local, read_id)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(local.rglob("*"))
    takeover.remove_dead_executors(local, clock.now_ms())
    assert list(local.rglob("*")) == [local_dirs.user_directory(local)]
