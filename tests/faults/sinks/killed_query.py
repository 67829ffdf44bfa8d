"""A driver that is made to be killed: running totals, shown through a sink, until it is told to end.

Started as a program with its `Job` as JSON in the one argument; `tests.faults.sinks.killing` does so. Micro-batch b has
the numbers from b x ROWS on. Each key sees all micro-batches, so its state tells the number of the micro-batch, and
every row of output carries the attempt that made it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming import DataStreamWriter

import holdfast
from holdfast import sinks
from tests.faults import killed_driver
from tests.faults.sinks.killed_at import KilledAt
from tests.faults.sinks.targets import Place, target_of

OPERATOR = "totals"
KEYS, ROWS = 40, 80
COLUMNS = "key long, batch long, n long, total long, part int, run string, attempt string"
# One partition is later than the other, as in life: kills find some of a micro-batch written, and some not.
_SKEW_S, _AFTERWARDS_S = 0.3, 0.1
# Starts without a micro-batch, before the driver gives up: its sink's server may be away for some seconds.
_STARTS_IN_VAIN = 60
YIELDED = 3


@dataclass(frozen=True)
class Job(killed_driver.Job):
    """What the driver is to do."""

    #: One of `TARGETS` or `OTHERS`.
    target: str = "csv"
    #: Where the target is.
    place: Place | None = None
    #: ``exactly_once``, ``steps`` (the same, and it dies at each step of the protocol), ``source`` (the sink as a data
    #: source), or ``plain``: what is done without holdfast's sinks; by foreachBatch it dies once between its first
    #: write and the end of the micro-batch, whatever else kills it.
    way: str = "exactly_once"
    #: Whether it ends when its query fails, as it does where another driver has begun.
    yields: bool = False

    @property
    def stop(self) -> Path:
        return self.path / "stop"


def totals_of(run: str) -> Callable[[holdfast.ShardBatch], pa.Table]:
    def add_up(batch: holdfast.ShardBatch) -> pa.Table:
        old, new = batch.state.get(), batch.groups
        totals = {
            "batch": pc.add(pc.coalesce(old["batch"], -1), 1),
            "n": pc.add(pc.coalesce(old["n"], 0), new.count()),
            "total": pc.add(pc.coalesce(old["total"], 0), new.sum("value")),
        }
        batch.state.put(**totals)
        context = TaskContext.get()
        assert context is not None
        time.sleep(_SKEW_S * (context.partitionId() % 2))
        rows = batch.keys
        for name, column in totals.items():
            rows = rows.append_column(name, column)
        # Differs from attempt to attempt.
        attempt = {"part": context.partitionId(), "run": run, "attempt": f"{run}-{context.taskAttemptId()}"}
        for name, value in attempt.items():
            kind = pa.int32() if name == "part" else pa.string()
            rows = rows.append_column(name, pa.repeat(pa.scalar(value, kind), len(rows)))
        return rows

    return add_up


def totals(numbers: DataFrame, mode: str, name: str = OPERATOR) -> DataFrame:
    """Return the running totals of numbers, as the operator of this name."""
    keyed = holdfast.stream(numbers.select((sf.col("value") % KEYS).alias("key"), "value")).groupBy("key")
    function = totals_of(uuid.uuid4().hex[:8])
    return keyed.applyInArrowWithState(function, COLUMNS, "batch long, n long, total long", mode, name=name)


def run_once(spark: SparkSession, job: Job) -> None:
    """Start the query and wait until it fails, or ends because it is to."""
    mode = "append" if job.way == "source" or target_of(job.target).appends_only else "update"
    rows = totals(spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load(), mode)
    location = str(job.path / "query")
    own = _own_writer(job, rows)
    if own is not None:
        writer = own.outputMode(mode).option("checkpointLocation", location)
        query = writer.start()
        while query.isActive and not job.stop.exists():
            query.awaitTermination(0.1)
        query.stop()
        if query.exception() is None:
            # What was stopped half-way is ended.
            writer.trigger(once=True).start().awaitTermination()
        return
    writer = rows.writeStream.outputMode(mode).option("checkpointLocation", location)
    writer.foreachBatch(_until_stopped(job, _writing(job))).start().awaitTermination()


def _own_writer(job: Job, rows: DataFrame) -> DataStreamWriter | None:
    """Return the writer of a stream, where rows do not go through foreachBatch."""
    target, place = target_of(job.target), job.place or {}
    if job.way == "plain":
        return target.plain_writer(target.shape(rows), place)
    if job.way != "source":
        return None
    found = target.source(place)
    assert found is not None
    form, options = found
    writer = target.shape(rows).writeStream.format(form).option("name", target.name).options(**options)
    return writer.options(**sinks.source_options(rows.sparkSession, target.sink(place)))


def _writing(job: Job) -> Callable[[DataFrame, int], None]:
    target, place = target_of(job.target), job.place or {}
    if job.way == "plain":
        return lambda frame, _: target.plain(target.shape(frame), place)
    sink = target.sink(place)
    if job.way == "steps":
        sink = KilledAt(sink, str(job.path / "marks"))
    write = sinks.exactly_once(sink)
    return lambda frame, batch_id: write(target.shape(frame), batch_id)


def _until_stopped(job: Job, write: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
    """Return a function that ends the query between micro-batches, where all that was decided is visible."""
    written: list[int] = []

    def write_or_end(frame: DataFrame, batch_id: int) -> None:
        if written and job.stop.exists():
            raise EOFError("told to end")
        write(frame, batch_id)
        written.append(batch_id)
        # Time for a kill between what the target shows and what Spark notes.
        (job.path / "written").mkdir(exist_ok=True)
        (job.path / "written" / str(batch_id)).touch()
        if job.way == "plain" and not (died := job.path / "died").exists():
            # Random kills may all miss the moment that tells most.
            died.touch()
            os.killpg(os.getpgrp(), signal.SIGKILL)
        time.sleep(_AFTERWARDS_S)

    return write_or_end


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    target = target_of(job.target)
    if job.way == "plain" and (jars := target.jars()):
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {','.join(jars)} {os.environ['PYSPARK_SUBMIT_ARGS']}"
    spark = killed_driver.start_spark(job)
    spark.conf.set("spark.sql.shuffle.partitions", 2)
    for option, value in target.options(job.place or {}).items():
        spark.conf.set(f"spark.holdfast.sink.{target.name}.{option}", value)
    commits, in_vain = job.path / "query" / "commits", 0
    while in_vain < _STARTS_IN_VAIN:
        before = _newest(commits)
        try:
            run_once(spark, job)
        except StreamingQueryException:
            if not job.stop.exists():
                print(f"the query failed; {traceback.format_exc()}", flush=True)
            if job.yields and not job.stop.exists():
                sys.exit(YIELDED)
        if job.stop.exists() and _newest(commits) > before:
            spark.stop()
            return
        in_vain = 0 if _newest(commits) > before else in_vain + 1
        time.sleep(0.2)
    sys.exit(1)


def _newest(commits: Path) -> int:
    return max((int(path.name) for path in commits.glob("[0-9]*")), default=-1)


def newest_commit(job: Job) -> int:
    """Return the newest micro-batch that Spark has ended."""
    return _newest(job.path / "query" / "commits")


if __name__ == "__main__":
    main()
