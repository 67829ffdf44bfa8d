"""The demo's driver process: runs the query over all files, then reports the result.

It reads a `Job` as JSON from standard input. Since it may be killed at any moment, it leaves its findings in files for
the process that watches it::

    <work dir>/
        flights/flights-000.parquet …     the input, one file per micro-batch
        query/                            Spark's checkpoint location of the query
        local/                            local state of a backend on disk
        output/batch=7/                   the rows of each micro-batch; or a sink's files
        restored/, output-restored/       the same for a query restored from a savepoint
        savepoint.json, restored.json     facts about the savepoint and the restored query
        sessions                          one line per start: when Spark's session was up
        progress.jsonl                    one line per committed micro-batch
        state.arrow, result.json          at the end: the state and its size
        state-half-way.arrow              at the end: the state at the kill, if there is a sink
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.feather as feather

from holdfast import clock, explain, read_state, savepoints
from holdfast.examples.flights.data import FLIGHT_COLUMNS
from holdfast.examples.flights.results.base import SINK_OPTIONS, Results
from holdfast.examples.flights.results.places import RESULTS
from holdfast.examples.flights.starts import note_session
from holdfast.examples.flights.totals import OPERATOR, running_totals
from holdfast.settings import STORAGE_PREFIX
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)

QUERY, RESTORED = "query", "restored"
SAVEPOINT = "half-way"
_WATCH_EVERY_S = 0.1
_SLOTS_MAX = 4


@dataclass(frozen=True)
class Job:
    """The task of a driver process."""

    work_dir: str
    state_dir: str  #: URL of durable state
    configuration: dict[str, str]  #: Spark settings beyond those of this module
    restarts: int = 0  #: Times to restart the query after failures
    savepoints: str | None = None  #: URL of the savepoints' directory, if there are any
    stop_after: int | None = None  #: Stop with a savepoint after this many committed micro-batches
    from_savepoint: bool = False  #: Continue from the savepoint as a new query with twice the shards
    sink: str | None = None  #: A key of `RESULTS`
    run: str = ""  #: Identifies this run of the demo
    half_way: int | None = None  #: Also read the state after this micro-batch
    before: int = 0  #: The savepoint's last micro-batch, which a restored query numbers 0

    @property
    def folder(self) -> Path:
        return Path(self.work_dir)

    @property
    def query(self) -> Path:
        """The query's checkpoint location."""
        return self.folder / (RESTORED if self.from_savepoint else QUERY)

    @property
    def output(self) -> Path:
        """The folder of results; without a sink, a restored query gets a new one, since its numbers start at 0."""
        return self.folder / (f"output-{RESTORED}" if self.from_savepoint and self.sink is None else "output")

    def results(self) -> Results:
        given = self.configuration.items()
        options = {key.removeprefix(SINK_OPTIONS): value for key, value in given if key.startswith(SINK_OPTIONS)}
        return RESULTS[self.sink](self.output, self.run, options)


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
        "spark.holdfast.state.dir": job.state_dir,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(slots),
        "spark.sql.warehouse.dir": str(job.folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **job.configuration,
        **job.results().settings(),
    }
    builder = SparkSession.builder.master(f"local[{slots}]").appName("holdfast demo")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def start_query(spark: SparkSession, job: Job) -> StreamingQuery:
    """Start the query, or resume where an earlier driver stopped."""
    source = spark.readStream.schema(FLIGHT_COLUMNS).option("maxFilesPerTrigger", 1)
    totals = running_totals(source.parquet(str(job.folder / "flights")))
    writer = totals.writeStream.foreachBatch(job.results().writer(job.before)).outputMode("update")
    return writer.trigger(availableNow=True).option("checkpointLocation", str(job.query)).start()


def committed(query: Path) -> int:
    """Count the micro-batches in Spark's commit log, without a restored query's first, which it did not run."""
    found = sum(path.name.isdigit() for path in (query / "commits").glob("*"))
    return max(0, found - 1) if query.name == RESTORED else found


def watch(query: StreamingQuery, progress: Path, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Log the duration of each micro-batch until `is_enough` or the query ends; raise the query's error if it fails."""
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
            if is_enough():
                return
            time.sleep(_WATCH_EVERY_S)
    query.awaitTermination()


def run(spark: SparkSession, job: Job) -> int:
    """Run the query to its end and return the number of restarts.

    Acts like a supervisor in production: if storage is unavailable for longer than holdfast retries, the micro-batch
    fails, and the next start resumes from the checkpoint location.
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
            _log.warning("the query failed; restarting it", exc_info=True)


def describe(spark: SparkSession, job: Job, restarts: int) -> None:
    """Store the state and its size."""
    started_ms = clock.monotonic_ms()
    state = read_state(spark, job.query, OPERATOR)
    read_ms = clock.monotonic_ms() - started_ms
    feather.write_feather(state, str(job.folder / "state.arrow"))
    if job.half_way is not None:
        then = read_state(spark, job.query, OPERATOR, batchId=job.half_way)
        feather.write_feather(then, str(job.folder / "state-half-way.arrow"))
    with stored(job) as storage:
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


def save(spark: SparkSession, job: Job) -> None:
    """Run the query half-way and stop it with a savepoint."""
    assert job.savepoints is not None
    enough = job.stop_after or 0
    query = start_query(spark, job)
    watch(query, job.folder / "progress.jsonl", lambda: committed(job.query) >= enough)
    made = savepoints.stop(spark, query, job.query, job.savepoints, SAVEPOINT)
    (operator,) = made.operators
    found = {"rows": sum(operator.rows.values()), "size_bytes": made.size_bytes, "shards": operator.shards}
    (job.folder / "savepoint.json").write_text(json.dumps({**found, "batches": made.query.batch_id + 1}))


def restore(spark: SparkSession, job: Job) -> Job:
    """Restore the savepoint as a new query, which continues the first query's sink, if any; return its job."""
    assert job.savepoints is not None
    made = savepoints.read(job.savepoints, SAVEPOINT, storage_values(job))
    shards = 2 * made.operators[0].shards
    continued = job.sink is not None
    query_id = savepoints.restore(spark, job.savepoints, SAVEPOINT, job.query, shards=shards, continue_sinks=continued)
    spark.conf.set("spark.holdfast.shards", str(shards))  # overrides the number in the first query's state
    (job.folder / "restored.json").write_text(json.dumps({"query_id": query_id, "shards": shards}))
    return replace(job, before=made.query.batch_id)


def storage_values(job: Job) -> dict[str, str]:
    """Return the values of ``spark.holdfast.storage.*``."""
    given = job.configuration.items()
    return {key.removeprefix(STORAGE_PREFIX): value for key, value in given if key.startswith(STORAGE_PREFIX)}


def stored(job: Job) -> ObjectStorage:
    """Open the job's state directory."""
    return open_storage(job.state_dir, storage_values(job))


def encode(job: Job) -> bytes:
    return json.dumps(asdict(job)).encode()


def main() -> None:
    """Run the job on standard input; if its query fails, end the log with an explanation."""
    from pyspark.errors import StreamingQueryException

    job = Job(**json.load(sys.stdin))
    spark = start_spark(job)
    note_session(job.folder)
    try:
        if job.stop_after is not None:
            save(spark, job)
        else:
            if job.from_savepoint:
                job = restore(spark, job)
            describe(spark, job, run(spark, job))
    except StreamingQueryException as error:
        _log.exception("the query failed")
        sys.exit(explain(error))
    spark.stop()


if __name__ == "__main__":
    main()
