"""A query in an application of its own, which ends: what it leaves locally is there for the next one.

Started as a program with a folder that holds ``input``, the name of a backend, and settings (``key=value``); prints the
output by micro-batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import holdfast
from tests.spark.application import start_spark
from tests.spark.conftest import count_and_sum

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def main(folder: Path, backend: str, *more: str) -> None:
    settings = {"spark.holdfast.backend": backend, "spark.holdfast.commit.carriedBytes": "0"}
    spark = start_spark(folder, settings | dict(setting.split("=") for setting in more))
    print("RESULT", json.dumps(outputs(spark, folder, "query")))
    spark.stop()


def outputs(spark: SparkSession, folder: Path, query: str) -> list[list[Any]]:
    """Run a query on what it has not read yet, and return its output by micro-batch."""
    batches: list[list[Any]] = []

    def collect(rows: DataFrame, _: int) -> None:
        batches.append(sorted(([row["key"], row["n"], row["total"]] for row in rows.collect()), key=repr))

    source = spark.readStream.schema("key string, v long").option("maxFilesPerTrigger", 1)
    totals = (
        holdfast.stream(source.parquet(str(folder / "input")))
        .groupBy("key")
        .applyInArrowWithState(
            count_and_sum, "key string, n long, total long", "n long, total long", "update", name="totals"
        )
    )
    writer = totals.writeStream.foreachBatch(collect).outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / query)).start().awaitTermination()
    return batches


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
