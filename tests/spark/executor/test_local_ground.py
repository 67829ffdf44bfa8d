"""Bad ground for local state under a running query: the batch fails whole, and on good ground it goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException

from holdfast.spark_integration.executor.local_dirs import choose_root
from tests.spark.conftest import Lab, count_and_sum

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import holdfast

pytestmark = [pytest.mark.spark, pytest.mark.slow]

FIRST = [("a", 1), ("b", 2), (None, 3)]
MANY = pa.table({"key": pa.array([f"k{i}" for i in range(30_000)]), "v": pa.array(range(30_000), pa.int64())})
AFTER_BOTH = {f"k{i}": (1, i) for i in range(30_000)} | {"a": (1, 1), "b": (1, 2), None: (1, 3)}


def begun(lab: Lab) -> None:
    lab.feed(FIRST)
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
    assert lab.state() == AFTER_BOTH


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
    assert lab.state() == AFTER_BOTH


@pytest.mark.all
def test_a_disk_that_vanishes_in_the_middle_of_a_batch(lab: Lab, tmp_path: Path) -> None:
    """It was there when the shard was opened; when it is written, it is not."""
    disk, gone, marker = tmp_path / "disk", tmp_path / "gone", tmp_path / "now"

    def unplugging(batch: holdfast.ShardBatch) -> pa.Table:
        if marker.exists() and not gone.exists():
            disk.rename(gone)
            disk.write_text("no directory")
        return count_and_sum(batch)

    lab.configure({"backend": "filesystem", "local.dir": str(disk), "shards": "1"})
    lab.feed(FIRST)
    lab.run(lab.totals(func=unplugging))
    lab.feed(MANY)
    marker.touch()
    with pytest.raises(StreamingQueryException, match=rf"(?s)UnavailableError.*{disk}.*spark\.holdfast\.local\.dir"):
        lab.run(lab.totals(func=unplugging))
    assert len(lab.state()) == 3
    marker.unlink()
    disk.unlink()
    shutil.rmtree(gone)
    lab.run(lab.totals(func=unplugging))
    assert lab.state() == AFTER_BOTH


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
