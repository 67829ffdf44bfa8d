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
from tests.repetitions import LONG, repetitions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS = 25 if LONG else 4


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("transport", ["packed", "rows"])
@pytest.mark.parametrize("seed", repetitions(1, 2))
def test_kills_change_nothing(transport: str, seed: int, spark: SparkSession, tmp_path: Path) -> None:
    run = Killings(Job(str(tmp_path), transport), random.Random(f"{seed} {transport}"))
    run.run(KILLS)
    batches = micro_batches(tmp_path)
    assert sum(len(files) for files in batches) == run.files
    state, output = expected(batches)
    spark.conf.set("spark.holdfast.checkpoint.dir", str(tmp_path / "durable"))
    try:
        stored = holdfast.read_state(spark, tmp_path / "query", OPERATOR).to_pylist()
    finally:
        spark.conf.unset("spark.holdfast.checkpoint.dir")
    found = {row["key"]: (row["n"], row["total"], row["last"]) for row in stored}
    story = f"seed {seed}, transport {transport}: {run.describe()}"
    assert len(found) == len(stored), story
    assert found == state, story
    written = found_output(tmp_path)
    wrong = [batch for batch in output if written.get(batch) != output[batch]]
    assert not wrong, f"wrong output in micro-batches {wrong}; {story}"
    assert set(written) == set(output), story
    print(f"\n{transport}, seed {seed}: killed {run.done}, the query failed {run.failures} times")
    shutil.rmtree(tmp_path)
