"""A driver process that is made to be killed: running totals over a file source, in a streaming query.

Started as a program with its `Job` as JSON in the one argument; `tests.faults.killings` does so.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

import holdfast
from tests.spark_classes import FILE_MANAGERS

OPERATOR = "totals"
DAEMON = "tests.spark_daemon"
# What the last driver knew at its end of its micro-batches: their rows, by number.
METRICS = "metrics.json"
# A key's state is deleted when it has seen so many rows.
ROWS_MAX = 40


@dataclass(frozen=True)
class Job:
    """What the driver is to do: `folder` holds input, output and both state directories."""

    folder: str
    backend: str = "memory"
    # Four attempts a task: a killed Python worker fails the task that it ran.
    master: str = "local[2,4]"
    # Whether `spark.holdfast.local.dir` names a folder; else local state lies where an executor has its own files.
    names_local_dir: bool = True
    # Where state servers answer Prometheus; if it is set, the query's progress has metrics as well.
    metrics_port: int = 0
    #: Whether Spark generates and compiles code, as it does for users.
    compiles: bool = True

    @property
    def path(self) -> Path:
        return Path(self.folder)


def start_spark(job: Job) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.cores.max": "2",
        "spark.driver.memory": "1g",
        "spark.executor.cores": "1",
        "spark.executor.memory": "512m",
        "spark.holdfast.backend": job.backend,
        "spark.holdfast.state.dir": str(job.path / "durable"),
        # Some commits are objects, and others travel with the pointer.
        "spark.holdfast.commit.carriedBytes": "6k",
        "spark.holdfast.snapshot.maxCommits": "5",
        # Workers are forked from a process that has imported the libraries, also those that replace the killed.
        "spark.python.daemon.module": DAEMON,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.factoryMode": "FALLBACK" if job.compiles else "NO_CODEGEN",
        "spark.sql.codegen.wholeStage": str(job.compiles).lower(),
        # As Spark has them by default, for what a kill leaves of its files; other tests take what is faster.
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "true",
        "spark.sql.streaming.checkpointFileManagerClass": f"{FILE_MANAGERS}.FileContextBasedCheckpointFileManager",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if job.names_local_dir:
        settings["spark.holdfast.local.dir"] = str(job.path / "local")
    if job.metrics_port:
        settings["spark.holdfast.metrics.port"] = str(job.metrics_port)
        settings["spark.holdfast.metrics.inProgress"] = "true"
    builder = SparkSession.builder.master(job.master).appName("to be killed")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def add_up(batch: holdfast.ShardBatch) -> pa.Table:
    old, new = batch.state.get(), batch.groups
    totals = {
        "n": pc.add(pc.coalesce(old["n"], 0), new.count()),
        "total": pc.add(pc.coalesce(old["total"], 0), new.sum("amount")),
        "last": new.last("seq", order_by="seq"),
    }
    full = pc.greater_equal(totals["n"], ROWS_MAX)
    batch.state.put(**totals)
    batch.state.delete(where=full)
    return batch.keys.append_column("n", totals["n"]).append_column("total", totals["total"])


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    spark = start_spark(job)
    source = spark.readStream.schema("key long, amount long, seq long").option("maxFilesPerTrigger", 1)
    events = source.parquet(str(job.path / "input"))
    totals = (
        holdfast.stream(events)
        .groupBy("key")
        .applyInArrowWithState(
            add_up, "key long, n long, total long", "n long, total long, last long", "update", name=OPERATOR
        )
    )

    def write(rows: DataFrame, batch_id: int) -> None:
        rows.write.mode("overwrite").parquet(str(job.path / "output" / f"batch={batch_id}"))

    writer = totals.writeStream.foreachBatch(write).outputMode("update").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(job.path / "query")).start()
    query.awaitTermination()
    if job.metrics_port:
        rows = {row["batchId"]: row["rows"] for row in holdfast.metrics(query).collect()}
        (job.path / METRICS).write_text(json.dumps(rows))
    spark.stop()


if __name__ == "__main__":
    main()
