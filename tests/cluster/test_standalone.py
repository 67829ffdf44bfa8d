"""Standalone clusters on this machine: two executors each, of which one is killed, or both attempt the same."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import holdfast
from tests.cluster.standalone import EXECUTOR, START_S, cluster
from tests.faults.killed_driver import OPERATOR, Job
from tests.faults.killings import Killings, expected, found_output, micro_batches
from tests.spark.application import run_program
from tests.spark.processors import speculating
from tests.tiers import ALL, LONG, cases

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SERVER = "holdfast.spark_integration.server.state_server"
SPECULATING = Path(speculating.__file__)


@pytest.mark.cluster
@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
def test_an_executor_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    with cluster(tmp_path) as master:
        run = Killings(Job(str(tmp_path), master=master, compiles=ALL), random.Random(0))
        with run.cleaned_up():
            executors = executors_at_work(run)
            directories = {path.name.split("-")[1]: path for path in (tmp_path / "local").glob("*/executor-*")}
            assert set(directories) == {str(pid) for pid in executors}, "each executor has its own local state"
            # Its state server as well: it would remove what the executor leaves.
            for server in run.processes(SERVER):
                os.kill(server, signal.SIGKILL)
            os.kill(executors[0], signal.SIGKILL)
            left = directories[str(executors[0])]
            run.tell(f"killed executor {executors[0]} and all state servers")
            removed = run.reach(lambda: not left.exists(), patience_s=START_S)
            run.wait_for_the_end()
            assert run.ended_well(), run.describe()
    assert removed or not left.exists(), f"what the dead executor left is still there: {left}; {run.describe()}"
    require_exact(spark, run)


@pytest.mark.cluster
@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(900)
@pytest.mark.all
def test_an_executor_without_a_local_directory_is_killed(spark: SparkSession, tmp_path: Path) -> None:
    """Local state then lies among the executor's own files, and goes with them."""
    with cluster(tmp_path) as master:
        job = Job(str(tmp_path), "filesystem", master, names_local_dir=False, compiles=ALL)
        run = Killings(job, random.Random(0))
        with run.cleaned_up():
            executors = executors_at_work(run)
            assert local_state(tmp_path), run.describe()
            os.kill(executors[0], signal.SIGKILL)
            run.tell(f"killed executor {executors[0]}")
            run.wait_for_the_end()
            assert run.ended_well(), run.describe()
            deadline = time.monotonic() + START_S
            while local_state(tmp_path):
                assert time.monotonic() < deadline, "the worker has not removed the application's files"
                time.sleep(0.1)
    require_exact(spark, run)


def executors_at_work(run: Killings) -> list[int]:
    """Start the query, and return its two executors when both have state."""
    run.add_files(14 if LONG else 10)
    run.start_driver()
    committed = run.reach(lambda: run.count("query/commits/[0-9]*") >= 4, patience_s=START_S)
    executors = list(run.processes(EXECUTOR))
    assert committed, run.describe()
    assert len(executors) == 2, run.describe()
    return executors


def local_state(folder: Path) -> list[Path]:
    """Return the shards among the executors' own files."""
    return list((folder / "spark-local").glob("**/shard-*"))


def require_exact(spark: SparkSession, run: Killings) -> None:
    """Require state and output as of a query that nobody disturbed."""
    folder = run.job.path
    state, output = expected(micro_batches(folder))
    spark.conf.set("spark.holdfast.state.dir", str(folder / "durable"))
    try:
        stored = holdfast.read_state(spark, folder / "query", OPERATOR).to_pylist()
    finally:
        spark.conf.unset("spark.holdfast.state.dir")
    assert {row["key"]: (row["n"], row["total"], row["last"]) for row in stored} == state, run.describe()
    assert found_output(folder) == output, run.describe()


@pytest.mark.cluster
@pytest.mark.spark
@pytest.mark.slow(60)
@pytest.mark.timeout(600)
@pytest.mark.all
@pytest.mark.parametrize("backend", cases(["memory", "filesystem", "rocksdb"]))
def test_two_attempts_at_a_shard_at_once(backend: str, tmp_path: Path) -> None:
    """With speculation both run, on two hosts; Spark takes one, and each row counts once in each micro-batch."""
    with cluster(tmp_path, hosts=2) as master:
        told, _ = run_program(SPECULATING, tmp_path, master, backend)
    found = json.loads(told)
    keys = range(speculating.KEYS)
    assert found["second"] == speculating.BATCHES, "each micro-batch was attempted twice"
    assert found["output"] == [[n] * len(keys) for n in range(1, speculating.BATCHES + 1)]
    assert found["counts"] == [[key, speculating.BATCHES] for key in keys]
    assert found["batches"] == [[key, batch] for key in keys for batch in range(speculating.BATCHES)]
