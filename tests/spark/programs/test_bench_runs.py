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
from holdfast.benches.runs.child_process import BenchError
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

# One call for each line of standard input.
_CHILD = """
import json, sys
from holdfast.benches.instruments.processes import adopt_orphans
from holdfast.benches.runs import child_process
adopt_orphans()
for line in sys.stdin:
    child_process.carry_out(json.loads(line))
    print("done", flush=True)
"""


class OneChild:
    """Stands for `call_in_child`: one process carries out all calls, since a JVM starts slowly."""

    def __init__(self, folder: Path) -> None:
        self._result = folder / "result.json"
        self._process: subprocess.Popen[str] | None = None

    def call(self, what: str, function: str, *arguments: Any, **_: Any) -> Any:
        """Carry out the call, and return what it returns."""
        if self._process is None:
            command, pipe = [sys.executable, "-c", _CHILD], subprocess.PIPE
            self._process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"function": function, "arguments": arguments, "result": str(self._result)}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        shown = []
        for line in self._process.stdout:
            if line == "done\n":
                return json.loads(self._result.read_text())
            shown.append(line)
        raise BenchError(f"{what} failed:\n{''.join(shown)}")

    def end(self) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneChild]:
    found = OneChild(tmp_path_factory.mktemp("child"))
    yield found
    found.end()


# Command, sizes and labels.
COMPARED: list[tuple[str, list[str], list[str]]] = [
    ("job-a", ["--engines", "holdfast-memory,spark-aiwps-count", "--rows", "1000", "--keys", "100"],
     ["holdfast-memory", "spark-aiwps-count"]),
    ("job-a", ["--engines", "holdfast-memory", "--vary", "snapshot-commits=2,9", "--rows", "1000", "--keys", "100"],
     ["holdfast-memory, snapshot-commits 2", "holdfast-memory, snapshot-commits 9"]),
    ("dropin", ["--engines", "pandas-memory,spark-pandas-rocksdb", "--touched", "10", "--rows", "20", "--keys", "20"],
     ["pandas-memory", "spark-pandas-rocksdb"]),
    *(("operators", ["--operator", operator, "--rows", "20", "--keys", "20"], ["operator-memory", "spark-operator"])
      for operator in ("window", "dedup", "session", "agg")),
    *(("dropin-tws", ["--engines", "holdfast-memory-row,spark-tws-row", "--variable", variable, "--touched", "10",
                      "--rows", "20", "--keys", "20"],
       ["holdfast-memory-row", "spark-tws-row"])
      for variable in ("value", "map", "list")),
]  # fmt: skip


@pytest.mark.all
@pytest.mark.parametrize(("command", "size", "labels"), cases(COMPARED))
def test_tiny_runs_are_compared(
    java_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    child: OneChild,
    command: str,
    size: list[str],
    labels: list[str],
) -> None:
    monkeypatch.setattr(paired, "call_in_child", child.call)
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
    for engine in found["engines"].values():
        assert len(engine["runs"][0]["batch_ms"]) == 4
        assert engine["rows_per_second"] > 0
        assert engine["runs"][0]["cpu"]["jvm"] > 0


@pytest.mark.all
def test_a_tiny_run_fills_the_document(java_home: Path, tmp_path: Path) -> None:
    """In a process of its own, as always but in the test above."""
    file = tmp_path / "tiny.json"
    size = ["--rows", "1000", "--keys", "100", "--batches", "3", "--warmup", "1", "--repeats", "1"]
    run = ["job-a", "--engines", "holdfast-memory", "--json", str(file)]
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
