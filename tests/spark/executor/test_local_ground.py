"""Local state under a running query: bad ground, local files that are used again, and batches that begin again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import holdfast
from holdfast.spark_integration.client.connection import client_of
from holdfast.spark_integration.executor.local_dirs import choose_root, executor_directory
from tests.spark.application import run_program
from tests.spark.conftest import Lab, count_and_sum
from tests.tiers import cases

if TYPE_CHECKING:
    import holdfast

pytestmark = [pytest.mark.spark, pytest.mark.slow]


FIRST_HERE = [("a", 1), ("b", 2), (None, 3)]
MANY = pa.table({"key": pa.array([f"k{i}" for i in range(30_000)]), "v": pa.array(range(30_000), pa.int64())})
AFTER_BOTH_HERE = {f"k{i}": (1, i) for i in range(30_000)} | {"a": (1, 1), "b": (1, 2), None: (1, 3)}


def begun(lab: Lab) -> None:
    lab.feed(FIRST_HERE)
    lab.run(lab.totals())
    lab.feed(MANY)


def test_beyond_the_limit_of_the_memory_backend_the_batch_fails_until_it_is_raised(lab: Lab, tmp_path: Path) -> None:
    """The error says what to do, and doing it is all there is to do."""
    lab.configure({"local.dir": str(tmp_path / "local"), "memory.limit": "500k"})
    begun(lab)
    expected = r"(?s)UnavailableError.*spark\.holdfast\.memory\.limit: raise.*limit_bytes=512000.*held_bytes=\d+"
    with pytest.raises(StreamingQueryException, match=expected):
        lab.run(lab.totals())
    assert len(lab.state()) == 3
    lab.configure({"memory.limit": "1g"})
    lab.run(lab.totals())
    assert lab.state() == AFTER_BOTH_HERE


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_fails_the_batch_and_another_disk_takes_it(lab: Lab, small_disk: Path, tmp_path: Path) -> None:
    lab.configure({"backend": "filesystem", "local.dir": str(small_disk)})
    begun(lab)
    expected = rf"(?s)UnavailableError.*no space left for local state at {small_disk}.*spark\.holdfast\.local\.dir"
    with pytest.raises(StreamingQueryException, match=expected):
        lab.run(lab.totals())
    assert len(lab.state()) == 3
    lab.configure({"local.dir": str(tmp_path / "large")})
    lab.run(lab.totals())
    assert lab.state() == AFTER_BOTH_HERE


@pytest.mark.all
def test_spark_gives_workers_the_directories_of_its_blocks(spark: SparkSession) -> None:
    """Spark deletes those when the executor ends, so `choose_root` takes the one around them, which lives longer."""

    def told(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        list(batches)
        dirs = os.environ["SPARK_LOCAL_DIRS"]
        root = choose_root(None, in_memory=False)
        yield pa.RecordBatch.from_pydict({"dirs": [dirs], "root": [str(root)]})

    (row,) = spark.range(1, numPartitions=1).mapInArrow(told, "dirs string, root string").collect()
    first = Path(row.dirs.split(",")[0])
    assert first.name.startswith("blockmgr-")
    assert row.root == str(first.parent)


PROGRAM = Path(__file__).parents[1] / "local_query.py"
ROWS = [("a", 1), ("b", 2), (None, 3), ("c", 4), ("d", 5), ("e", 6)]


def flip_a_bit_of_each(shard: Path) -> None:
    """As a failing disk does: in the middle of each run, with no time stamp to tell of it."""
    paths = list(shard.glob("versions/*/*.arrow"))
    assert paths
    for inode in {path.stat().st_ino: path for path in paths}.values():
        found = inode.stat()
        data = bytearray(inode.read_bytes())
        data[len(data) // 2] ^= 1
        with inode.open("r+b") as file:
            file.write(data)
        os.utime(inode, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.all
@pytest.mark.timeout(900)
def test_local_files_are_used_after_a_restart_and_restored_where_they_are_damaged(lab: Lab) -> None:
    """Of one shard nothing but the local files holds the state; of the other one they are damaged."""
    lab.feed(ROWS)
    shown, _ = run_program(PROGRAM, lab.folder, "filesystem")
    assert json.loads(shown) == [sorted(([key, 1, value] for key, value in ROWS), key=repr)]
    lab.local = lab.folder / "local"
    damaged, intact = sorted(shards(lab), key=lambda shard: shard.name)
    flip_a_bit_of_each(damaged)
    for commit in (lab.folder / "durable" / "totals" / intact.name[: len("shard-0000")]).glob("commits/*"):
        commit.write_bytes(b"gone")
    lab.configure({"backend": "filesystem", "local.dir": str(lab.local), "commit.carriedBytes": "0"})
    lab.feed(ROWS)
    (found,) = lab.run(lab.totals())
    assert {row["key"]: (row["n"], row["total"]) for row in found} == {key: (2, 2 * value) for key, value in ROWS}
    assert len(shards(lab)) == 2, "they were taken over, not copied"
    assert [path.parent.parent.name for path in lab.local.glob("*/*/disk/*/totals/shard-*/set-aside/*")] == [
        damaged.name
    ]


def shards(lab: Lab) -> list[Path]:
    return list(lab.local.glob("*/executor-*/disk/*/totals/shard-*"))


FIRST = [("a", 1), ("b", 2), ("a", 3), (None, 4)]
SECOND = [("a", 10), ("c", 20), (None, 30)]
AFTER_BOTH = {"a": (3, 14), "b": (1, 2), "c": (1, 20), None: (2, 34)}
Function = Callable[[holdfast.ShardBatch], pa.Table]


def told(calls: Path, call: Function) -> Function:
    """Return the function, which now also notes each of its calls."""

    def function(batch: holdfast.ShardBatch) -> pa.Table:
        with calls.open("a") as file:
            file.write(f"{batch.batch_id}\n")
        return call(batch)

    return function


def kill_server_once(local: Path, notes: Path) -> None:
    """Kill the state server of this worker's executor, unless that was noted before; an earlier test may have, too."""
    if not notes.exists():
        client = client_of(executor_directory(local))
        client.require_server()
        os.kill(client.call("statistics")["pid"], signal.SIGKILL)
        notes.touch()


def killing(local: Path, notes: Path, *, before: bool) -> Function:
    """Return a function that kills the state server in the second micro-batch, before it reads or before it commits."""

    def function(batch: holdfast.ShardBatch) -> pa.Table:
        if batch.batch_id == 1 and before:
            kill_server_once(local, notes)
        output = count_and_sum(batch)
        if batch.batch_id == 1 and not before:
            kill_server_once(local, notes)
        return output

    return function


@pytest.mark.parametrize("before", cases([False, True]), ids=lambda it: "read" if it else "commit")
def test_a_state_server_that_dies_in_the_middle(lab: Lab, tmp_path: Path, before: bool) -> None:
    """No micro-batch notices: none reads or writes through it."""
    lab.configure({"backend": "rocksdb", "shards": "1"})
    calls, notes = tmp_path / "calls", tmp_path / "killed"
    lab.feed(FIRST)
    lab.feed(SECOND)
    batches = lab.run(lab.totals(func=told(calls, killing(lab.local, notes, before=before))))
    assert notes.exists()
    assert calls.read_text().split() == ["0", "1"]
    assert {row["key"]: (row["n"], row["total"]) for row in batches[1]} == {key: AFTER_BOTH[key] for key, _ in SECOND}
    assert lab.state() == AFTER_BOTH


def test_local_files_that_are_damaged(lab: Lab, tmp_path: Path) -> None:
    """They are set aside, and the version is restored from durable commits in the same task."""
    lab.configure({"backend": "filesystem", "shards": "1"})
    calls = tmp_path / "calls"
    lab.feed(FIRST)
    lab.run(lab.totals())
    runs = list(lab.local.glob("*/*/disk/*/totals/*/versions/*/*.arrow"))
    cut = [os.truncate(path, path.stat().st_size - 1) for path in runs if path.stat().st_nlink]
    assert cut
    lab.feed(SECOND)
    lab.run(lab.totals(func=told(calls, count_and_sum)))
    assert calls.read_text().split() == ["1"], "the function was not called on a damaged state"
    assert lab.state() == AFTER_BOTH


# Any other error of a function: `test_faults.py`.
@pytest.mark.parametrize(
    "error",
    [pytest.param(ZeroDivisionError, marks=pytest.mark.all), holdfast.UnavailableError],
    ids=lambda e: e.__name__,
)
def test_errors_of_the_function_are_its_own(lab: Lab, tmp_path: Path, error: Any) -> None:
    """It may have effects elsewhere: it is called again only where holdfast itself has lost something."""
    lab.configure({"backend": "rocksdb", "shards": "1"})
    calls = tmp_path / "calls"

    def broken(batch: holdfast.ShardBatch) -> pa.Table:
        count_and_sum(batch)
        raise error("a mistake of the user's")

    lab.feed(FIRST)
    with pytest.raises(StreamingQueryException, match="a mistake of the user's"):
        lab.run(lab.totals(func=told(calls, broken)))
    assert calls.read_text().split() == ["0"]
