"""The driver process of the demo: runs the query over all files, then reports the result.

It takes a `Job` as JSON on standard input. What it finds out it leaves in files for the process that
watches it, since it may be killed at any moment::

    <work dir>/
        flights/flights-000.parquet …     the input, one file a micro-batch
        query/                            Spark's checkpoint location of the query
        local/                            local state, of a backend that keeps it on disk
        output/batch=7/                   what the query returned for each micro-batch
        sessions                          one line for each start: when Spark's session was up
        progress.jsonl                    one line a committed micro-batch
        state.arrow, result.json          at the end: the state, and what it takes
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.feather as feather

from holdfast import clock, read_state
from holdfast.examples.flights.data import FLIGHT_COLUMNS
from holdfast.examples.flights.starts import note_session
from holdfast.examples.flights.totals import OPERATOR, running_totals
from holdfast.settings import STORAGE_PREFIX
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)

_WATCH_EVERY_S = 0.1
_SLOTS_MAX = 4


@dataclass(frozen=True)
class Job:
    """What a driver process is to do.

    Attributes
    ----------
    work_dir : str
    checkpoint : str
        URL below which state is durable.
    configuration : dict of str to str
        Of the Spark session, beside what this module sets.
    restarts : int
        How often the query is started again after it failed.
    """

    work_dir: str
    checkpoint: str
    configuration: dict[str, str]
    restarts: int = 0

    @property
    def folder(self) -> Path:
        """The work directory as a path."""
        return Path(self.work_dir)


def start_spark(job: Job) -> SparkSession:
    """Return a session on this machine with as many slots as shards."""
    from pyspark.sql import SparkSession

    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    slots = min(os.cpu_count() or 1, _SLOTS_MAX)
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.holdfast.checkpoint.dir": job.checkpoint,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(slots),
        "spark.sql.warehouse.dir": str(job.folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **job.configuration,
    }
    builder = SparkSession.builder.master(f"local[{slots}]").appName("holdfast demo")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def start_query(spark: SparkSession, job: Job) -> StreamingQuery:
    """Start the query, or resume where an earlier driver stopped."""
    source = spark.readStream.schema(FLIGHT_COLUMNS).option("maxFilesPerTrigger", 1)
    totals = running_totals(source.parquet(str(job.folder / "flights")))

    def write(rows: DataFrame, batch_id: int) -> None:
        # Overwritten when a micro-batch is repeated, so the output holds each one once, too.
        rows.coalesce(1).write.mode("overwrite").parquet(str(job.folder / "output" / f"batch={batch_id}"))

    writer = totals.writeStream.foreachBatch(write).outputMode("update").trigger(availableNow=True)
    return writer.option("checkpointLocation", str(job.folder / "query")).start()


def watch(query: StreamingQuery, progress: Path) -> None:
    """Write down the duration of each micro-batch until the query has ended; raise what made it fail."""
    seen = -1
    with progress.open("a") as file:
        while True:
            active = query.isActive
            for batch in query.recentProgress:
                if batch["batchId"] > seen and batch["numInputRows"]:
                    seen = batch["batchId"]
                    line = {"batch": seen, "rows": batch["numInputRows"], "ms": batch["batchDuration"]}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
            if not active:
                break
            time.sleep(_WATCH_EVERY_S)
    query.awaitTermination()


def run(spark: SparkSession, job: Job) -> int:
    """Run the query to its end; return how often it was started again.

    As a supervisor would in production: if storage is away for longer than holdfast retries, the micro-batch fails, and
    the next start resumes from the checkpoint location.
    """
    from pyspark.errors import StreamingQueryException

    failures = 0
    while True:
        try:
            watch(start_query(spark, job), job.folder / "progress.jsonl")
            return failures
        except StreamingQueryException:
            if failures == job.restarts:
                raise
            failures += 1
            _log.warning("the query failed, and is started again", exc_info=True)


def describe(spark: SparkSession, job: Job, restarts: int) -> None:
    """Store the state and its size."""
    started_ms = clock.monotonic_ms()
    state = read_state(spark, job.folder / "query", OPERATOR)
    read_ms = clock.monotonic_ms() - started_ms
    feather.write_feather(state, str(job.folder / "state.arrow"))
    with open_storage(job.checkpoint, parse_storage_options(storage_values(job))) as storage:
        sizes = [found.size_bytes for found in storage.list("")]
    result = {
        "state_rows": state.num_rows,
        "state_bytes": state.nbytes,
        "read_ms": read_ms,
        "durable_bytes": sum(sizes),
        "durable_objects": len(sizes),
        "restarts": restarts,
    }
    (job.folder / "result.json").write_text(json.dumps(result))


def storage_values(job: Job) -> dict[str, str]:
    """Return the values of ``spark.holdfast.storage.*``."""
    given = job.configuration.items()
    return {key.removeprefix(STORAGE_PREFIX): value for key, value in given if key.startswith(STORAGE_PREFIX)}


def encode(job: Job) -> bytes:
    """Return a job as `main` reads it."""
    return json.dumps(asdict(job)).encode()


def main() -> None:
    """Run the job given on standard input."""
    job = Job(**json.load(sys.stdin))
    spark = start_spark(job)
    note_session(job.folder)
    describe(spark, job, run(spark, job))
    spark.stop()


if __name__ == "__main__":
    main()
