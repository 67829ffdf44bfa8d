"""A program whose environment is not activated: define a query, see what is said, then do as it says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import holdfast
from holdfast import ShardBatch
from holdfast.spark_integration.java import ensure_java
from tests.spark.application import settings_of


def count(batch: ShardBatch) -> pa.Table:
    batch.state.put(pa.table({"n": pa.array([1] * len(batch.groups), pa.int64())}))
    return batch.keys


def session(folder: Path) -> SparkSession:
    builder = SparkSession.builder.master("local[2]")
    here = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    for key, value in (here | settings_of(folder)).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def main(folder: Path) -> None:
    """Print what the definition said, how many jobs had run, and what the query returned in the end."""
    os.environ.pop("PYSPARK_PYTHON", None)
    ensure_java()
    said, jobs = "", 0
    spark = session(folder)
    try:
        defined(spark, folder)
    except holdfast.InvalidArgumentError as exc:
        said, jobs = str(exc), len(spark.sparkContext.statusTracker().getJobIdsForGroup())
    spark.stop()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = session(folder)
    found: list[int] = []
    writer = defined(spark, folder).writeStream.outputMode("update").trigger(availableNow=True)
    query = writer.foreachBatch(lambda rows, _: found.extend(row.k for row in rows.collect())).start()
    query.awaitTermination()
    print("RESULT", json.dumps([said, jobs, sorted(found)]))
    spark.stop()


def defined(spark: SparkSession, folder: Path) -> DataFrame:
    (folder / "input").mkdir(exist_ok=True)
    (folder / "input" / "rows.json").write_text('{"k": 1}\n{"k": 2}\n')
    events = spark.readStream.schema("k long").json(str(folder / "input"))
    return holdfast.stream(events).groupBy("k").applyInArrowWithState(count, "k long", "n long", "update")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
