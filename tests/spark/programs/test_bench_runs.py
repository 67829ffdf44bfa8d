"""Tiny runs of the benches fill their whole document, and a job means the same to holdfast and to Spark."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from holdfast.benches.command import bench
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.runs import paired, queries
from holdfast.benches.runs.child_process import Ended
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

# One run for each line of standard input.
_CHILD = """
import json, sys
from holdfast.benches.instruments.processes import adopt_orphans
from holdfast.benches.runs import child
adopt_orphans()
for line in sys.stdin:
    child.carry_out(json.loads(line))
    print("done", flush=True)
"""


class OneChild:
    """Stands for `run_child` in `run_engine`: one process carries out all orders, since a JVM starts slowly."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, order: dict[str, Any], environment: dict[str, str], _limit_s: float | None) -> Ended:
        """Carry out the order, and return as `run_child` does."""
        if self._process is None:
            command, pipe = [sys.executable, "-c", _CHILD], subprocess.PIPE
            self._process = subprocess.Popen(
                command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        shown = []
        for line in self._process.stdout:
            if line == "done\n":
                return Ended(0, "".join(shown))
            shown.append(line)
        return Ended(self._process.wait() or 1, "".join(shown))

    def end(self) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()


@pytest.fixture(scope="module")
def child() -> Iterator[OneChild]:
    found = OneChild()
    yield found
    found.end()


# Command, sizes, labels, targets and micro-batches.
COMPARED: list[tuple[str, list[str], list[str], list[str], int]] = [
    ("job-a", ["--engines", "holdfast-memory,spark-aiwps-count", "--rows", "1000", "--keys", "100"],
     ["holdfast-memory", "spark-aiwps-count"], ["state_bytes holdfast-memory"], 4),
    ("dropin", ["--engines", "pandas-memory", "--touched", "10", "--rows", "20", "--keys", "20", "--larger", "1"],
     ["pandas-memory", "spark-pandas-rocksdb"], ["pandas-memory/spark-pandas-rocksdb"], 4),
    ("timers", ["--rows", "4", "--keys", "80", "--fill-rows", "40", "--due", "2"],
     ["with timeouts", "without timeouts"], ["with timeouts/without timeouts"], 6),
    ("timers", ["--engine", "holdfast-memory", "--rows", "4", "--keys", "80", "--fill-rows", "40", "--due", "2"],
     ["with timeouts", "without timeouts"], ["with timeouts/without timeouts"], 6),
    ("ttl", ["--rows", "20", "--keys", "20", "--ttl", "500"],
     ["with TTL", "without TTL"], ["with TTL/without TTL"], 4),
    ("sessions", ["--engines", "holdfast-memory,pandas-memory", "--rows", "20", "--keys", "50"],
     ["holdfast-memory", "pandas-memory"], [], 4),
    *(("dropin-tws", ["--engines", "holdfast-memory-row,spark-tws-row", "--variable", variable, "--touched", "10",
                      "--rows", "20", "--keys", "20", "--larger", "1"],
       ["holdfast-memory-row", "spark-tws-row"], ["holdfast-memory-row/spark-tws-row"], 4)
      for variable in ("value", "map", "list")),
]  # fmt: skip


@pytest.mark.all
@pytest.mark.parametrize(("command", "size", "labels", "targets", "batches"), cases(COMPARED))
def test_tiny_runs_are_compared(
    java_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    child: OneChild,
    command: str,
    size: list[str],
    labels: list[str],
    targets: list[str],
    batches: int,
) -> None:
    monkeypatch.setattr(paired, "run_child", child.run)
    # What a run leaves, while its process lives, pytest removes.
    monkeypatch.setattr(paired, "choose_root", lambda *_, **__: tmp_path)
    file = tmp_path / "tiny.json"
    run = [command, *size, "--batches", "4", "--warmup", "3", "--repeats", "1", "--json", str(file)]
    run += ["--disk", str(tmp_path)]
    result = CliRunner().invoke(bench, run, catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(file.read_text())
    assert list(found["engines"]) == labels
    assert set(found["ratios"]) == {"/".join(labels)}
    assert [target["what"] for target in found["targets"]] == targets
    for engine in found["engines"].values():
        assert len(engine["runs"][0]["batch_ms"]) == batches
        assert engine["rows_per_second"] > 0
        assert engine["runs"][0]["cpu"]["jvm"] > 0


@pytest.mark.all
def test_a_tiny_run_fills_the_document(java_home: Path, tmp_path: Path) -> None:
    """In a process of its own, as always but in the test above."""
    file = tmp_path / "tiny.json"
    size = ["--rows", "1000", "--keys", "100", "--batches", "3", "--warmup", "1", "--repeats", "1"]
    run = ["job-a", "--engines", "holdfast-memory", "--profile", "--json", str(file)]
    result = CliRunner().invoke(bench, [*run, *size], catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(file.read_text())
    (engine,) = found["engines"].values()
    (only,) = engine["runs"]
    assert len(only["batch_ms"]) == 3
    assert engine["rows_per_second"] > 0
    assert only["cpu"]["jvm"] > 0
    assert only["memory"]["server"]["rss"] > 0
    assert only["written"]["durable"] == 0, "commits so small are carried"
    state = found["state_bytes"]["holdfast-memory"]
    assert state["live_arrow"] == 100 * 24, "keys and two sums of 8 bytes"
    assert state["local_peak"] >= state["local_final"] > 0
    assert only["spans"]["commit"]["calls"] == 2
    assert "spark.master" in found["settings"]["engines"]["holdfast-memory"]
    assert CliRunner().invoke(bench, ["table", str(file)]).output.startswith("## job-a")


@pytest.mark.all
@pytest.mark.parametrize("value_bytes", cases([92, 40, 300, 32]))
def test_job_b_means_the_same_to_holdfast_and_to_spark(spark: SparkSession, tmp_path: Path, value_bytes: int) -> None:
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    job = JobB(rows=64, keys=100, fill_rows=40, batches=4, warmup=1, skew=2.0, value_bytes=value_bytes)
    states = {}
    for name, query in (("here", queries.with_state), ("there", queries.spark_aggregation)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="this query's state is not durable")
            frame = query(job.source(spark), job)
        writer = frame.writeStream.format("memory").queryName(name).outputMode("update")
        started = writer.option("checkpointLocation", str(tmp_path / name)).start()
        while started.lastProgress is None or started.lastProgress["batchId"] < job.all_batches:
            assert started.exception() is None
            time.sleep(0.1)
        started.stop()
        end = dt.datetime.fromtimestamp(1_700_000_000 + 60 * job.all_batches, dt.UTC)
        rows_out = spark.table(name).where(F.col("last_seen") < F.lit(end))
        newest = rows_out.groupBy("key").agg(F.max_by(F.struct("*"), "n").alias("newest"))
        states[name] = sorted(newest.select("newest.*").collect())
    assert len(states["here"]) == job.keys
    assert states["here"] == states["there"]
    assert {len(row.page) for row in states["here"]} == {value_bytes - 32}
