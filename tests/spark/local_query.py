"""A query in an application of its own, which ends: what it leaves locally is there for the next one.

Started as a program with a folder that holds ``input``, and the name of a backend; prints the output by micro-batch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

import holdfast


def add_up(batch: holdfast.ShardBatch) -> pa.Table:
    old = batch.state.get()
    n = pc.add(pc.coalesce(old["n"], 0), batch.groups.count())
    total = pc.add(pc.coalesce(old["total"], 0), batch.groups.sum("v"))
    batch.state.put(n=n, total=total)
    return batch.keys.append_column("n", n).append_column("total", total)


def main(folder: Path, backend: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.holdfast.backend": backend,
        "spark.holdfast.checkpoint.dir": str(folder / "durable"),
        "spark.holdfast.commit.carriedBytes": "0",
        "spark.holdfast.local.dir": str(folder / "local"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder.master("local[2]").appName("local state")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    batches: list[list[Any]] = []

    def collect(rows: DataFrame, _: int) -> None:
        batches.append(sorted(([row["key"], row["n"], row["total"]] for row in rows.collect()), key=repr))

    source = spark.readStream.schema("key string, v long").option("maxFilesPerTrigger", 1)
    totals = (
        holdfast.stream(source.parquet(str(folder / "input")))
        .groupBy("key")
        .applyInArrowWithState(add_up, "key string, n long, total long", "n long, total long", "update", name="totals")
    )
    writer = totals.writeStream.foreachBatch(collect).outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "query")).start().awaitTermination()
    print("RESULT", json.dumps(batches))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
