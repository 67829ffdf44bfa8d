"""What look-ups bring to this machine, and that it goes."""

from __future__ import annotations

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.backends.run import TableSchema
from holdfast.snapshotter.lineage import ChainEntry
from holdfast.snapshotter.ownership.stored_tables import StoredTables
from holdfast.snapshotter.snapshots.snapshots import Snapshots
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.version_reader import VersionReader
from holdfast.spark_integration.executor import local_dirs, takeover
from holdfast.spark_integration.lookup.shard_readers import ShardReaders
from holdfast.spark_integration.shard.pointer_row import PointerRow
from tests.faults.elsewhere import run_elsewhere

STATE = TableSchema.of("state", pa.schema([("user", pa.string())]), pa.schema([("n", pa.int64())]))
ROW = PointerRow("q-1", "totals", 0, 1, Pointer(7, "aa"), None, None, 0)


def killed_looking_up(state_dir: Path, temporary: Path) -> None:
    os.environ.pop("SPARK_LOCAL_DIRS", None)
    tempfile.tempdir = str(temporary)
    lineage = SimpleNamespace(commits=(), snapshot=ChainEntry("snapshot", Pointer(7, "aa"), 100, "0" * 32))
    changed: Any = VersionReader, Snapshots
    changed[0].newest = lambda *_: SimpleNamespace(lineage=lineage, run_of=lambda _: None)
    changed[1].read_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    stored = StoredTables.of_first_run({"state": STATE})
    with ThreadPoolExecutor(1) as threads, open_storage(str(state_dir)) as storage:
        ShardReaders(storage, threads).first_rows("totals", ROW, stored, STATE, 0, 1)


@pytest.mark.slow(1)
def test_what_a_killed_look_up_brought_goes(tmp_path: Path) -> None:
    """The parts of snapshots that it had read stayed in the temporary directory for good."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = run_elsewhere(killed_looking_up, tmp_path / "state", temporary)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(temporary.rglob("files"))
    takeover.remove_dead_executors(temporary, clock.now_ms())
    assert list(temporary.rglob("*")) == [local_dirs.user_directory(temporary)]
