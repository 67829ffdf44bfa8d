"""One streaming query in this process's own Spark, watched from the driver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from holdfast.benches.instruments.measured import Measured, Places, state_bytes
from holdfast.benches.instruments.processes import Processes, since, spark_kind
from holdfast.benches.instruments.spark import session
from holdfast.benches.jobs.job import StreamingJob

_LOOK_EVERY_S = 0.05
_LOOK_AT_PROCESSES_EVERY_S = 0.5
_SETTLE_S = 1.0


@dataclass(frozen=True)
class StateFolders:
    """Where a query's state is."""

    local: Callable[[], Iterable[Path]]  # the folders of the working state, which appear while the query runs
    durable: Path  # the one from which it is restored
    live_bytes: Callable[[], int] | None = None  # the Arrow size of the live state, after the last micro-batch
    storage: Callable[[], dict[str, float]] = dict  # what was asked of the storage so far, by kind, if counted


def run_query(
    settings: dict[str, str],
    query: Callable[[SparkSession], DataFrame],
    job: StreamingJob,
    places: Places,
    folders: StateFolders,
    output_mode: str,
) -> Measured:
    """Run a query, which writes to the noop sink, until its last micro-batch is done."""
    spark = session(settings)
    writer = query(spark).writeStream.format("noop").outputMode(output_mode)
    started = writer.option("checkpointLocation", str(places.checkpoint)).start()
    watch = _Watch(job, folders)
    try:
        watch.until_done(started)
        progress = [p for p in started.recentProgress if p["batchId"] < job.all_batches]
    finally:
        started.stop()
    time.sleep(_SETTLE_S)  # let the state server finish what the last commit announced
    live = folders.live_bytes() if folders.live_bytes is not None else None
    watch.look_at_folders()
    spark.stop()
    return Measured(
        batch_ms=[p["durationMs"]["triggerExecution"] for p in progress],
        phases_ms=[dict(p["durationMs"]) for p in progress],
        cpu=watch.used[0],
        memory=watch.processes.peak(),
        written=watch.used[1],
        settings={k: v for k, v in settings.items() if not v.startswith(("/", "file:"))},
        state_bytes=state_bytes(watch.local, watch.after_batch, live),
        storage=watch.used[2],
    )


class _Watch:
    """Looks at a running query many times a second: its progress, its processes, its files."""

    def __init__(self, job: StreamingJob, folders: StateFolders) -> None:
        self._job, self._folders = job, folders
        self.processes = Processes(spark_kind)
        self.local: list[int] = []
        self.after_batch: list[int] = []
        #: Over the counted micro-batches: seconds, bytes written, and what was asked of the storage.
        self.used: list[dict[str, float]] = []

    def until_done(self, query: StreamingQuery) -> None:
        """Return when the last micro-batch is done; raise what stopped the query."""
        done, before, looked_s = -1, self._so_far(), 0.0
        while done < self._job.all_batches - 1:
            time.sleep(_LOOK_EVERY_S)
            failure = query.exception()
            if failure is not None:
                raise failure
            self.look_at_folders()
            if time.monotonic() - looked_s > _LOOK_AT_PROCESSES_EVERY_S:
                self.processes.look()
                looked_s = time.monotonic()
            last = query.lastProgress
            if last is not None and last["batchId"] > done:
                done = last["batchId"]
                self.after_batch.append(self.local[-1])
                if done < self._job.counted.start:
                    before = self._so_far()
        self.used = [since(*of) for of in zip(before, self._so_far(), strict=True)]

    def _so_far(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        self.processes.look()
        written = {**self.processes.written(), "durable": folder_bytes(self._folders.durable)}
        return self.processes.seconds(), written, self._folders.storage()

    def look_at_folders(self) -> None:
        """Note the size of the working state."""
        self.local.append(sum(map(folder_bytes, self._folders.local())))


def folder_bytes(folder: Path, *, hidden: bool = True) -> int:
    """Return the bytes of the files below a folder; a file with several links counts once."""
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names if hidden else [name for name in names if not name.startswith(".")]:
            try:
                facts = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue
            sizes[facts.st_ino] = facts.st_size
    return sum(sizes.values())
