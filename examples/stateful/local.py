"""Runs an example on this machine: reads a file per micro-batch and prints the results."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast import explain
from holdfast.spark_integration.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    Query = Callable[[DataFrame], DataFrame]

MicroBatch = list[tuple[Any, ...]]
# Processors need it; it keeps a pointer per shard.
_STATE_STORE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_FIRST_FILE_S = 1_700_000_000


def at(hour: int, minute: int, second: int = 0) -> datetime:
    return datetime(2026, 3, 2, hour, minute, second, tzinfo=UTC)


def run_both(
    by_key: Query, vectorised: Query, columns: str, batches: Sequence[MicroBatch], *, ends: bool = True
) -> None:
    """Run both forms of a query and print the rows of each micro-batch."""
    with tempfile.TemporaryDirectory() as folder, example_session() as spark:
        for query, query_ends in ((by_key, ends), (vectorised, True)):
            print(query.__name__)
            spark.conf.set("spark.holdfast.state.dir", f"{folder}/state-of-{query.__name__}")
            for number, rows in enumerate(run(spark, query, columns, batches, Path(folder), ends=query_ends)):
                for row in rows:
                    print(f"  micro-batch {number}: {row.asDict()}")


@contextmanager
def example_session() -> Iterator[SparkSession]:
    """Yield a quiet session with two task slots; if a query fails, exit with a short explanation."""
    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.errors import StreamingQueryException
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.stateStore.providerClass", _STATE_STORE)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    except StreamingQueryException as error:
        sys.exit(explain(error))
    finally:
        spark.stop()


def run(
    spark: SparkSession, query: Query, columns: str, batches: Sequence[MicroBatch], folder: Path, *, ends: bool = True
) -> list[list[Row]]:
    """Run a query over micro-batches and return its rows by micro-batch.

    Without `ends`, as for processing time, the query does not end by itself and is stopped when it has read all files.
    """
    _write(batches, columns, folder / "input")
    source = spark.readStream.schema(columns).option("maxFilesPerTrigger", 1).parquet(str(folder / "input"))
    found: list[list[Row]] = []
    writer = query(source).writeStream.outputMode("append").trigger(availableNow=True)
    writer = writer.foreachBatch(lambda rows, _: found.append(rows.collect()))
    running = writer.option("checkpointLocation", str(folder / query.__name__)).start()
    try:
        while not ends and running.isActive and len(running.recentProgress) < len(batches):
            time.sleep(0.1)
        if ends:
            running.awaitTermination()
    finally:
        running.stop()
    if error := running.exception():
        raise error
    return found


def tables(batches: Sequence[MicroBatch], columns: str) -> list[pa.Table]:
    names = [column.split()[0] for column in columns.split(", ")]
    return [pa.table(dict(zip(names, zip(*batch, strict=True), strict=True))) for batch in batches]


def _write(batches: Sequence[MicroBatch], columns: str, folder: Path) -> None:
    """Write a file per micro-batch; Spark reads files by modification time."""
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(tables(batches, columns)):
        path = folder / f"{number:03d}.parquet"
        pq.write_table(rows, path)
        os.utime(path, (_FIRST_FILE_S + number, _FIRST_FILE_S + number))
