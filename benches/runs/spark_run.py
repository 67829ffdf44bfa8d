"""One streaming query in this process's own Spark, watched from the driver."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.benches.instruments.measured import Measured, Places
from holdfast.benches.instruments.processes import Processes, since, spark_kind
from holdfast.benches.jobs.job import StreamingJob

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK_EVERY_S = 0.05
_LOOK_AT_PROCESSES_EVERY_S = 0.5
_SETTLE_S = 1.0
_PROFILED_DAEMON = "holdfast.benches.instruments.profiled_daemon"


@dataclass(frozen=True)
class StateFolders:
    """Where a query's state is: asked again and again, since folders appear while it runs.

    Attributes
    ----------
    local : callable
        Returns the folders of the working state.
    durable : callable
        Returns those from which it is restored.
    live_bytes : callable
        Returns the Arrow size of the live state, after the last micro-batch, or None where that is not measured.
    storage : callable
        Returns what was asked of the storage so far, by kind; nothing where that is not counted.
    """

    local: Callable[[], Iterable[Path]]
    durable: Callable[[], Iterable[Path]]
    live_bytes: Callable[[], int | None]
    storage: Callable[[], dict[str, float]] = dict


def run_query(
    settings: dict[str, str],
    query: Callable[[SparkSession], DataFrame],
    job: StreamingJob,
    places: Places,
    folders: StateFolders,
    output_mode: str = "update",
) -> Measured:
    """Run a query until its last micro-batch is done.

    Parameters
    ----------
    settings : dict
        All Spark settings.
    query : callable
        Returns the frame to write to the noop sink.
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
        .outputMode(output_mode)
        .option("checkpointLocation", str(places.checkpoint))
        .start()
    )
    watch = Watch(job, folders)
    try:
        watch.until_done(started)
        progress = [p for p in started.recentProgress if p["batchId"] < job.all_batches]
    finally:
        started.stop()
    time.sleep(_SETTLE_S)  # let the state server finish what the last commit announced
    state = watch.state_bytes()
    spark.stop()
    return Measured(
        batch_ms=[p["durationMs"]["triggerExecution"] for p in progress],
        phases_ms=[dict(p["durationMs"]) for p in progress],
        cpu=watch.cpu,
        memory=watch.memory,
        written=watch.written,
        settings={k: v for k, v in settings.items() if not v.startswith(("/", "file:"))},
        state_bytes=state,
        storage=watch.storage,
    )


class Watch:
    """Looks at a running query many times a second: its progress, its processes, its files."""

    def __init__(self, job: StreamingJob, folders: StateFolders) -> None:
        self._job = job
        self._folders = folders
        self._processes = Processes(spark_kind)
        self._peak = 0
        self._after_batch: list[int] = []
        self.cpu: dict[str, float] = {}
        self.memory: dict[str, dict[str, int]] = {}
        self.written: dict[str, float] = {}
        self.storage: dict[str, float] = {}

    def until_done(self, query: StreamingQuery) -> None:
        """Return when the last micro-batch is done; raise what stopped the query."""
        done, before, looked_s = -1, self._so_far(), 0.0
        while done < self._job.all_batches - 1:
            time.sleep(_LOOK_EVERY_S)
            failure = query.exception()
            if failure is not None:
                raise failure
            size = self._local_bytes()
            if time.monotonic() - looked_s > _LOOK_AT_PROCESSES_EVERY_S:
                self._processes.look()
                looked_s = time.monotonic()
            last = query.lastProgress
            if last is not None and last["batchId"] > done:
                done = last["batchId"]
                self._after_batch.append(size)
                if done < self._job.counted.start:
                    before = self._so_far()
        after = self._so_far()
        self.cpu = since(before[0], after[0])
        self.written = since(before[1], after[1])
        self.storage = since(before[2], after[2])
        self.memory = self._processes.peak()

    def _so_far(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        self._processes.look()
        durable = sum(map(folder_bytes, self._folders.durable()))
        written = {**self._processes.written(), "durable": durable}
        return self._processes.seconds(), written, self._folders.storage()

    def _local_bytes(self) -> int:
        size = sum(map(folder_bytes, self._folders.local()))
        self._peak = max(self._peak, size)
        return size

    def state_bytes(self) -> dict[str, Any]:
        """Return the sizes of the local state, and of the live state where that is measured."""
        live = self._folders.live_bytes()
        return {
            "live_arrow": live,
            "local_final": self._local_bytes(),
            "local_peak": self._peak,
            "ratio": round(self._peak / max(live, 1), 3) if live is not None else None,
            "after_batch": self._after_batch,
        }


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
