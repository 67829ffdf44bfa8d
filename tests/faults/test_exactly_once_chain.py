"""Exactly once with operators behind operators: killed at random moments, saved, and restored on another backend."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from holdfast import savepoints
from tests.faults import killed_chain
from tests.faults.killed_driver import Job
from tests.faults.killings import Killings, input_of
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.tiers import kills

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS = kills(quick=1, long=25)
#: By backend that on which the query is restored.
BACKENDS = {"memory": "rocksdb", "filesystem": "memory", "rocksdb": "filesystem"}
#: Beside those that come while processes are killed: before the savepoint, sessions must be over.
FILES = 16
DAY_US = 86_400_000_000

pytestmark = [pytest.mark.all, pytest.mark.slow(120), pytest.mark.spark, pytest.mark.timeout(6000)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_kills_change_nothing(backend: str, spark: SparkSession, tmp_path: Path) -> None:
    """A dedup, a join and sessions: what both queries show is what one computation over all input finds."""
    job = Job(str(tmp_path), backend)
    run = Killings(job, random.Random(f"{backend} chain"), program=killed_chain.__name__)
    run.add_files(FILES)
    run.run(KILLS)
    run.stop_servers()
    story = f"{job}: {run.describe()}"
    with configured(spark, settings_of(tmp_path, "durable", backend)):
        savepoints.create(spark, tmp_path / "query", tmp_path / "savepoints", "one")
    last_us = add_a_later_day(run)
    with configured(spark, settings_of(tmp_path, "again", BACKENDS[backend])):
        savepoints.restore(spark, tmp_path / "savepoints", "one", tmp_path / "restored", shards=3)
        killed_chain.run(spark, tmp_path, "restored", "restored-output")
    before, after = (shown_in(tmp_path / name) for name in ("output", "restored-output"))
    right = [row for row in killed_chain.expected(tmp_path) if row[1] < last_us]
    assert sorted(before + after, key=repr) == sorted(right, key=repr), story
    assert min(len(before), len(after)) > 50, f"hardly a session is over, which shows nothing: {len(before)} before"
    print(f"\n{backend}: killed {run.done}, {len(before)} and {len(after)} sessions, failed {run.failures} times")
    shutil.rmtree(tmp_path)


def add_a_later_day(run: Killings) -> int:
    """Add a file by which all other sessions are over; return a time between them and its own."""
    file = input_of(run.files)
    later = pc.add(file["at"], pa.scalar(DAY_US, pa.duration("us")))
    file = file.set_column(file.column_names.index("at"), "at", later)
    pq.write_table(file, run.job.path / "input" / f"{run.files:04d}.parquet")
    first_us: int = pc.min(later.cast(pa.int64())).as_py()
    return first_us - DAY_US // 2


def settings_of(folder: Path, state_dir: str, backend: str) -> dict[str, str]:
    own = {"state.dir": str(folder / state_dir), "local.dir": str(folder / "local"), "backend": backend}
    return NEEDED | {f"spark.holdfast.{name}": value for name, value in own.items()}


def shown_in(folder: Path) -> list[tuple[Any, ...]]:
    """Return the sessions that a query has shown; the sink's own log says which of its files count.

    Spark refuses to read by that log what a restored query has written, which begins with micro-batch 1.
    """
    logs = [log.read_text().splitlines()[1:] for log in (folder / "_spark_metadata").glob("[0-9]*")]
    names = {Path(json.loads(line)["path"]).name for lines in logs for line in lines}
    files = [pq.read_table(folder / name, coerce_int96_timestamp_unit="us") for name in sorted(names)]
    columns = pa.concat_tables(files).columns
    columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in columns]
    return list(zip(*(column.to_pylist() for column in columns), strict=True))
