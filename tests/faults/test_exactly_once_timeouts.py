"""Exactly once with timeouts: processes are killed at random moments, and each session is closed once, and whole."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import holdfast
from tests.faults import killed_sessions
from tests.faults.killed_driver import Job
from tests.faults.killed_sessions import OPERATOR, expected
from tests.faults.killings import Killings, micro_batches
from tests.tiers import ALL, kills, repetitions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS = kills(quick=3)
# test_exactly_once and test_exactly_once_processor kill others.
BACKENDS = ["rocksdb"]
ALL_BACKENDS = [*BACKENDS, "memory", "filesystem"]

pytestmark = [pytest.mark.slow(60), pytest.mark.spark, pytest.mark.timeout(3000)]


@pytest.mark.all
@pytest.mark.parametrize("backend", ALL_BACKENDS if ALL else BACKENDS)
@pytest.mark.parametrize("seed", repetitions(1, 2))
def test_kills_change_nothing(backend: str, seed: int, spark: SparkSession, tmp_path: Path) -> None:
    job = Job(str(tmp_path), backend, compiles=ALL)
    run = Killings(job, random.Random(f"{seed} {backend} timeouts"), program=killed_sessions.__name__)
    run.run(KILLS)
    check_result(run, spark)
    print(f"\n{backend}, seed {seed}: killed {run.done}, the query failed {run.failures} times")


def check_result(run: Killings, spark: SparkSession) -> None:
    """Compare sessions, states and timeouts with what comes of the same rows, one after the other."""
    folder = run.job.path
    batches = micro_batches(folder)
    assert sum(len(batch.files) for batch in batches) == run.files
    open_sessions, closed = expected(batches)
    story = f"{run.job}: {run.describe()}"
    spark.conf.set("spark.holdfast.state.dir", str(folder / "durable"))
    try:
        tables = [holdfast.read_state(spark, folder / "query", OPERATOR, table=name) for name in ("state", "timers")]
    finally:
        spark.conf.unset("spark.holdfast.state.dir")
    state, timers = ({row.pop("user"): tuple(row.values()) for row in table.to_pylist()} for table in tables)
    assert [table.num_rows for table in tables] == [len(state), len(timers)], story
    assert state == {user: session[:3] for user, session in open_sessions.items()}, story
    assert timers == {user: session[3:] for user, session in open_sessions.items()}, story
    # The sink's own log says which of its files count.
    written = [tuple(row) for row in spark.read.parquet(str(folder / "output")).collect()]
    assert sorted(written, key=repr) == sorted(closed, key=repr), story
    assert len(closed) > len(open_sessions) / 2, "hardly a session has been closed: this shows nothing"
    run.stop_servers()
    shutil.rmtree(folder)
