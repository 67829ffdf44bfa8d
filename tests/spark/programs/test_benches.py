"""Benches on Spark: runs, suites and peers."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from holdfast.benches.command import bench
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.peers.engines import ENGINES
from holdfast.benches.peers.job import FromFiles
from holdfast.benches.runs import engines, paired
from holdfast.benches.runs.child_process import BenchError
from holdfast.benches.runs.paired import Entry, run_engine
from holdfast.benches.suites.measurement import Profile
from holdfast.benches.suites.suites import peers
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.all, pytest.mark.slow]


# One call for each line of standard input.
_CHILD = """
import json, sys
from holdfast.benches.instruments.measured import adopt_orphans
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
    ("operators", ["--operator", "join", "--rows", "20", "--keys", "60", "--waiting", "60"],
     ["operator-memory", "spark-operator"]),
    *(("dropin-tws", ["--engines", "holdfast-memory-row,spark-tws-row", "--variable", variable, "--touched", "10",
                      "--rows", "20", "--keys", "20"],
       ["holdfast-memory-row", "spark-tws-row"])
      for variable in ("value", "map", "list", "timer")),
]  # fmt: skip


@pytest.mark.timeout(600)
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
        assert len(engine["runs"][0]["batch_ms"]) == (5 if "--waiting" in size else 4)
        assert engine["rows_per_second"] > 0
        assert engine["runs"][0]["cpu"]["jvm"] > 0


@pytest.mark.timeout(600)
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("value_bytes", cases([92, 40, 300, 32]))
def test_job_b_means_the_same_to_holdfast_and_to_spark(spark: SparkSession, tmp_path: Path, value_bytes: int) -> None:
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    job = JobB(rows=64, keys=100, fill_rows=40, batches=4, warmup=1, skew=2.0, value_bytes=value_bytes)
    states = {}
    for name, query in (("here", engines.with_state), ("there", engines.spark_aggregation)):
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


ROOT = Path(__file__).parents[3]

# Java, since results say which one it is.


class Command:
    """The command in a process of its own, with temporary files in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.out, self.temporary = folder / "results", folder / "temporary"
        self.temporary.mkdir()
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        script = Path(__file__).with_name("tiny_bench.py")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), "bench", "run", "--suite", "tiny", "--out", str(self.out)],
                env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def runs(self) -> list[dict[str, object]]:
        try:
            lines = (self.out / "tiny/size.runs.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def is_running_one(self) -> bool:
        """Tell whether a run of an engine has a process now."""
        return any("holdfast.benches.runs.child_process" in part for one in self.below() for part in _command(one))

    def below(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def folders(self) -> list[Path]:
        return list(self.temporary.iterdir())


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def wait_until(reached: Callable[[], object], command: Command, within_s: float = 120) -> None:
    end_s = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < end_s, command.log.read_text()
        time.sleep(0.05)


@pytest.mark.slow(15)
def test_a_run_is_stopped_then_killed_and_goes_on(java_home: Path, tmp_path: Path) -> None:
    command = Command(tmp_path)
    command.start()
    wait_until(lambda: len(command.runs()) == 1 and command.is_running_one(), command)
    below = command.below()
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(60) == 130
    assert "The same command continues from here" in command.log.read_text()
    assert not [one for one in below if one.is_running()]
    assert command.folders() == []
    first = command.runs()

    command.start()
    wait_until(lambda: len(command.runs()) == len(first) + 1 and command.is_running_one(), command)
    below = command.below()
    command.process.kill()
    command.process.wait()
    wait_until(lambda: not [one for one in below if one.is_running()], command)
    second = command.runs()
    assert second[: len(first)] == first

    command.start()
    assert command.process.wait(120) == 0, command.log.read_text()
    found = json.loads((command.out / "tiny/size.json").read_text())
    times = [run["batch_ms"] for engine in found["engines"].values() for run in engine["runs"]]
    assert len(times) == 4
    assert all(line["run"]["batch_ms"] in times for line in second)  # type: ignore[index]
    assert not list((command.out / "tiny").glob("*.jsonl"))


ASKED = sorted({entry.engine for one in peers(Profile()) for entry in one.entries.values()} - {"floor"})


@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not os.environ.get("HOLDFAST_TEST_PEERS"),
    reason="installs 2.6 GB of other stream processors: HOLDFAST_TEST_PEERS=1",
)
@pytest.mark.parametrize("engine", ASKED)
def test_counts_and_sums_are_those_of_the_rows(java_home: Path, tmp_path: Path, engine: str) -> None:
    """Each engine compares its own with pyarrow's, and fails if they differ."""
    if engine in ENGINES:
        ENGINES[engine].program.environment.install()
    run = run_engine(Entry(engine, FromFiles(rows=2000, keys=500, batches=3, warmup=1)), disk=str(tmp_path))
    assert run["equality"]["equal"]
    assert run["equality"]["rows"] == 500 if engine in ENGINES else run["equality"]["rows"] > 450
    assert run["rows_per_second"] > 0
