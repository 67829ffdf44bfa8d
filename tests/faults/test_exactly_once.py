"""Exactly once: processes are killed at random moments, and the result is that of an undisturbed computation."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import holdfast
from tests.faults.killed_driver import OPERATOR, Job
from tests.faults.killings import Killings, expected, found_output, micro_batches
from tests.tiers import ALL, kills, repetitions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# At least one of each: driver, worker, server.
KILLS = kills(quick=3)
# test_exactly_once_timeouts and test_exactly_once_processor kill others.
BACKENDS = [pytest.param("memory", marks=pytest.mark.smoke)]
ALL_BACKENDS = ["memory", "filesystem", "rocksdb"]

pytestmark = [pytest.mark.slow(60), pytest.mark.spark, pytest.mark.timeout(3000)]


@pytest.mark.parametrize("backend", ALL_BACKENDS if ALL else BACKENDS)
@pytest.mark.parametrize("seed", repetitions(1, 2))
def test_kills_change_nothing(backend: str, seed: int, spark: SparkSession, tmp_path: Path) -> None:
    run = Killings(Job(str(tmp_path), backend), random.Random(f"{seed} {backend}"))
    run.run(KILLS)
    check_result(run, spark)
    print(f"\n{backend}, seed {seed}: killed {run.done}, the query failed {run.failures} times")


@pytest.mark.all
def test_a_query_outlives_its_state_server(spark: SparkSession, tmp_path: Path) -> None:
    """Spark in local mode gives a task one attempt, and each shard of a batch loses its owner in the middle.

    `tests/spark/executor/test_begins_again.py` shows the same at chosen moments.
    """
    job = Job(str(tmp_path), "rocksdb", master="local[2]")
    run = Killings(job, random.Random("server"), victims=("server",), once_a_batch=True)
    run.run(KILLS)
    assert run.failures == 0, run.describe()
    check_result(run, spark)


def check_result(run: Killings, spark: SparkSession) -> None:
    """Compare state and output with what comes of the same rows, one after the other; then remove the folder."""
    folder = run.job.path
    batches = micro_batches(folder)
    assert sum(len(batch.files) for batch in batches) == run.files
    state, output = expected(batches)
    spark.conf.set("spark.holdfast.state.dir", str(folder / "durable"))
    try:
        stored = holdfast.read_state(spark, folder / "query", OPERATOR).to_pylist()
    finally:
        spark.conf.unset("spark.holdfast.state.dir")
    found = {row["key"]: (row["n"], row["total"], row["last"]) for row in stored}
    story = f"{run.job}: {run.describe()}"
    assert len(found) == len(stored), story
    assert found == state, story
    written = found_output(folder)
    wrong = [batch for batch in output if written.get(batch) != output[batch]]
    assert not wrong, f"wrong output in micro-batches {wrong}; {story}"
    assert set(written) == set(output), story
    run.stop_servers()
    shutil.rmtree(folder)
