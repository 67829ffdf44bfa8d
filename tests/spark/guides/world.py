"""What the pages speak of: a query of 58 micro-batches, or one on Spark's own operator, and their savepoints.

A program: it makes `query` or `spark` below a folder that stands for `/`, in an application of its own.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from holdfast import savepoints
from tests.input_files import add_file
from tests.spark.application import start_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCHES = 58
USERS = ("ann", "bob", "cem", "dan", "eve")


def totals(batch: holdfast.ShardBatch) -> pa.Table:
    old = batch.state.get()
    n = pc.add(pc.coalesce(old["n"], 0), batch.groups.count())
    total = pc.add(pc.coalesce(old["total"], 0.0), batch.groups.sum("amount"))
    batch.state.put(n=n, total=total)
    batch.timers.set(pa.array([batch.processing_ms + 3_600_000] * batch.keys.num_rows))
    return batch.keys.append_column("n", n).append_column("total", total)


def totals_of(events: DataFrame) -> DataFrame:
    return (
        holdfast.stream(events)
        .groupBy("user")
        .applyInArrowWithState(
            totals,
            "user string, n long, total double",
            "n long, total double",
            "update",
            name="totals",
            timeMode="ProcessingTime",
        )
    )


def count(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Be the function of docs/migrate.md."""
    (n,) = state.getOption or (0,)
    n += sum(len(frame) for frame in frames)
    state.update((n,))
    yield pd.DataFrame({"user": [key[0]], "n": [n]})


def session(folder: Path) -> SparkSession:
    """Return the session in which pages run: state is where they say."""
    four = {"spark.sql.shuffle.partitions": "4", "spark.sql.streaming.noDataMicroBatches.enabled": "false"}
    spark = start_spark(folder, four)
    spark.conf.unset("spark.holdfast.state.dir")
    return spark


def events_of(spark: SparkSession, folder: Path) -> DataFrame:
    """Return the stream that pages call `events` or `df`."""
    source = spark.readStream.schema("user string, amount double").option("maxFilesPerTrigger", 1)
    return source.parquet(str(folder / "data" / "events"))


def timed_of(spark: SparkSession, folder: Path) -> DataFrame:
    """Return the same stream with event times, 40 minutes between two micro-batches, and decimal amounts."""
    source = spark.readStream.schema("user string, amount double, at timestamp").option("maxFilesPerTrigger", 1)
    timed = source.parquet(str(folder / "data" / "events")).withWatermark("at", "10 minutes")
    return timed.withColumn("amount", timed["amount"].cast("decimal(9,2)"))


def feed(folder: Path, first: int, batches: int) -> None:
    for number in range(first, first + batches):
        users = [USERS[number % len(USERS)], "ann"]
        at = [dt.datetime(2026, 3, 2, 9, tzinfo=dt.UTC) + number * dt.timedelta(minutes=40)] * len(users)
        add_file(folder / "data" / "events", number, pa.table({"user": users, "amount": [1.5, 0.5], "at": at}))


def run(out: DataFrame, location: Path, mode: str = "update") -> None:
    writer = out.writeStream.outputMode(mode).option("checkpointLocation", str(location)).format("noop")
    running = writer.trigger(processingTime="0 seconds").start()
    try:
        running.processAllAvailable()
    finally:
        running.stop()


def main(which: str, folder: Path) -> None:
    spark, location = session(folder), folder / "data" / "app-spark"
    feed(folder, 0, 3 if which == "spark" else BATCHES)
    events = events_of(spark, folder)
    if which == "spark":
        counts = events.groupBy("user").applyInPandasWithState(
            count, "user string, n long", "n long", "update", "NoTimeout"
        )
        run(counts, location)
        hours = timed_of(spark, folder).groupBy("user", F.window("at", "1 hour"))
        run(hours.agg(F.count("*").alias("n"), F.sum("amount").alias("total")), folder / "data/hours-spark", "append")
    else:
        spark.conf.set("spark.holdfast.state.dir", str(folder / "data" / "app"))
        run(totals_of(events), location)
        for name, batch in (("before-upgrade", None), ("before", None), ("after-upgrade", BATCHES - 2)):
            savepoints.create(spark, location, folder / "data" / "savepoints", name, batchId=batch)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
