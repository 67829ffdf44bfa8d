"""An application that makes a savepoint beside its query, or restores one, and is made to be killed.

Started as a program with a folder, what to do, and the settings of its Spark as JSON. The folder holds ``input``, and
the query's ``query`` and ``durable``. It prints ``BEGIN`` and ``END`` around what it is to do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import savepoints
from tests.spark.application import start_spark
from tests.spark.savepoints.queries import counts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

COLUMNS = "key string, v long"
#: A number that executors of the standalone cluster see as shards, too.
SHARDS = 3


def totals(spark: SparkSession, folder: Path) -> DataFrame:
    """Return how many rows each key has had."""
    source = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(folder / "input"))
    return counts(source, ["key"], "totals")


def start(spark: SparkSession, folder: Path) -> StreamingQuery:
    """Start the query on what it has not read yet, for ever; it keeps but two micro-batches."""
    writer = totals(spark, folder).writeStream.format("noop").outputMode("update")
    return writer.option("checkpointLocation", str(folder / "query")).start()


def main(folder: Path, what: str, settings: str) -> None:
    spark = start_spark(folder, json.loads(settings))
    query = None
    if what != "restore":
        query = start(spark, folder)
        query.processAllAvailable()
    print("BEGIN", flush=True)
    target = folder / "savepoints"
    if what == "create":
        savepoints.create(spark, folder / "query", target, "one")
    elif what == "stop":
        assert query is not None
        savepoints.stop(spark, query, folder / "query", target, "one")
    else:
        spark.conf.set("spark.holdfast.checkpoint.dir", str(folder / "durable-again"))
        savepoints.restore(spark, target, "one", folder / "again", shards=SHARDS)
    print("END", flush=True)
    if query is not None and query.isActive:
        query.processAllAvailable()
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
