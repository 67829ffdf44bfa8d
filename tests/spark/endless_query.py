"""A query in an application of its own that runs until it is killed; prints ``READY`` with each micro-batch.

Started as a program with a folder that holds ``input``, the name of the query and of its checkpoint location there, and
optionally ``hang``: then its function never returns, and ``READY`` is printed when it was called. Prints ``FAILED`` and
the error when the query fails.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import StreamingQueryException

import holdfast
from tests.spark.application import start_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def main(folder: Path, name: str, *, hangs: bool) -> None:
    called = folder / "called"

    def add_up(batch: holdfast.ShardBatch) -> pa.Table:
        if hangs:
            called.touch()
            threading.Event().wait()
        old = batch.state.get()
        n = pc.add(pc.coalesce(old["n"], 0), batch.groups.count())
        total = pc.add(pc.coalesce(old["total"], 0), batch.groups.sum("v"))
        batch.state.put(n=n, total=total)
        return batch.keys.append_column("n", n).append_column("total", total)

    spark = start_spark(folder)

    def ready(rows: DataFrame, _: int) -> None:
        rows.collect()
        print("READY", flush=True)

    source = spark.readStream.schema("key string, v long").option("maxFilesPerTrigger", 1)
    totals = (
        holdfast.stream(source.parquet(str(folder / "input")))
        .groupBy("key")
        .applyInArrowWithState(add_up, "key string, n long, total long", "n long, total long", "update", name="totals")
    )
    writer = totals.writeStream.foreachBatch(ready).outputMode("update").queryName(name)
    query = writer.trigger(processingTime="200 milliseconds").option("checkpointLocation", str(folder / name)).start()
    if hangs:
        while not called.exists():
            query.awaitTermination(0.1)
        print("READY", flush=True)
    try:
        query.awaitTermination()
    except StreamingQueryException as exc:
        print("FAILED", str(exc).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], hangs="hang" in sys.argv[3:])
