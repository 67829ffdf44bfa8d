"""One streaming query in this process's own Spark, watched from the driver."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from holdfast.benches.engines import Measured, Places
from holdfast.benches.job_a import Job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK_EVERY_S = 0.05
_SETTLE_S = 1.0
_PROFILED_DAEMON = "holdfast.benches.profiled_daemon"


def run_query(
    settings: dict[str, str],
    query: Callable[[SparkSession], DataFrame],
    job: Job,
    places: Places,
    live_bytes: Callable[[], int] | None,
) -> Measured:
    """Run a query until its last micro-batch is done.

    Parameters
    ----------
    settings : dict
        All Spark settings.
    query : callable
        Returns the frame to write to the noop sink.
    live_bytes : callable or None
        Returns the Arrow size of the live state, after the last micro-batch; None measures no state.
    """
    from pyspark.sql import SparkSession

    from holdfast.spark_integration.java import ensure_java

    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("holdfast bench")
    for key, value in settings.items():
        builder = builder.config(key, value)
    if places.profile is not None:
        builder = builder.config("spark.python.daemon.module", _PROFILED_DAEMON)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    started = (
        query(spark)
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(places.disk / "checkpoint"))
        .start()
    )
    watch = Watch(job, places.memory)
    try:
        watch.until_done(started)
        progress = [p for p in started.recentProgress if p["batchId"] < job.batches]
    finally:
        started.stop()
    state = None
    if live_bytes is not None:
        time.sleep(_SETTLE_S)  # let the state server finish what the last commit announced
        state = watch.state_bytes(live_bytes())
    spark.stop()
    return Measured(
        batch_ms=[p["durationMs"]["triggerExecution"] for p in progress],
        phases_ms=[dict(p["durationMs"]) for p in progress],
        cpu=watch.cpu,
        settings={k: v for k, v in settings.items() if not v.startswith(("/", "file:"))},
        state_bytes=state,
    )


class Watch:
    """Looks at a running query many times a second: its progress, its processes, its local files."""

    def __init__(self, job: Job, local_dir: Path) -> None:
        self._job = job
        self._local_dir = local_dir
        self._peak = 0
        self._after_batch: list[int] = []
        self.cpu: dict[str, float] = {}

    def until_done(self, query: StreamingQuery) -> None:
        """Return when the last micro-batch is done; raise what stopped the query."""
        done, before = -1, process_seconds()
        while done < self._job.batches - 1:
            time.sleep(_LOOK_EVERY_S)
            failure = query.exception()
            if failure is not None:
                raise failure
            size = folder_bytes(self._local_dir)
            self._peak = max(self._peak, size)
            last = query.lastProgress
            if last is not None and last["batchId"] > done:
                done = last["batchId"]
                self._after_batch.append(size)
                if done < self._job.warmup:
                    before = process_seconds()
        after = process_seconds()
        self.cpu = {kind: round(after[kind] - before.get(kind, 0.0), 3) for kind in after}

    def state_bytes(self, live_arrow: int) -> dict[str, Any]:
        """Return the sizes of the local state against the Arrow size of the live state."""
        return {
            "live_arrow": live_arrow,
            "local_peak": self._peak,
            "local_final": folder_bytes(self._local_dir),
            "ratio": round(self._peak / max(live_arrow, 1), 3),
            "after_batch": self._after_batch,
        }


def process_seconds() -> dict[str, float]:
    """Return seconds so far: of the wall, and of CPU by kind of process below this one."""
    seconds = {"wall": time.monotonic(), "jvm": 0.0, "python": 0.0, "server": 0.0}
    for process in psutil.Process().children(recursive=True):
        try:
            times, name, command = process.cpu_times(), process.name(), process.cmdline()
        except psutil.Error:
            continue  # ended between being listed and being asked
        kind = "jvm" if "java" in name else "python"
        if any(part.endswith("state_server") for part in command):
            kind = "server"
        seconds[kind] += times.user + times.system
    return seconds


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder; a file with several links counts once."""
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                facts = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue
            sizes[facts.st_ino] = facts.st_size
    return sum(sizes.values())
