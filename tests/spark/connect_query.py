"""A query over Spark Connect, in a process of its own: a server and a classic session cannot share one.

Started as a program with a folder that holds ``input``; prints the state at the end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

import holdfast

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState


def add_up(batch: holdfast.ShardBatch) -> pa.Table:
    n = pc.add(pc.coalesce(batch.state.get()["n"], 0), batch.groups.count())
    batch.state.put(n=n)
    return batch.keys.append_column("n", n)


def add_up_by_key(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    (n,) = state.getOption or (0,)
    n += sum(len(chunk) for chunk in chunks)
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def main(folder: Path) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.holdfast.checkpoint.dir": str(folder / "durable"),
        "spark.holdfast.local.dir": str(folder / "local"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    builder = SparkSession.builder.remote("local[2]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    source = spark.readStream.schema("key string, v long").option("maxFilesPerTrigger", 1)
    events = source.parquet(str(folder / "input"))
    counts = (
        holdfast.stream(events)
        .groupBy("key")
        .applyInArrowWithState(add_up, "key string, n long", "n long", "update", name="counts")
    )
    writer = counts.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "query")).start().awaitTermination()
    state = holdfast.read_state(spark, folder / "query", "counts")
    by_key = (
        holdfast.stream(events)
        .groupBy("key")
        .applyInPandasWithState(add_up_by_key, "key string, n long", "n long", "update", "NoTimeout", name="by_key")
    )
    writer = by_key.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "query-by-key")).start().awaitTermination()
    state_by_key = holdfast.read_state(spark, folder / "query-by-key", "by_key")
    batch = spark.createDataFrame([("a", 1), ("a", 2)], "key string, v long")
    once = (
        holdfast.stream(batch)
        .groupBy("key")
        .applyInArrowWithState(add_up, "key string, n long", "n long", "update", name="counts")
    )
    found = {
        "state": sorted(state.to_pylist(), key=repr),
        "state by key": sorted(state_by_key.to_pylist(), key=repr),
        "batch": [row.asDict() for row in once.collect()],
    }
    print("RESULT", json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
