"""Queries in an application of their own that run until it is killed, each in a folder of its own.

Started as a program with a folder and the names of queries, which are folders in it that hold ``input``. Each keeps its
checkpoint location in ``first`` and its state in ``durable`` there. Prints ``READY`` and the name with each
micro-batch; ``FAILED``, the name and the error when a query fails. The function of a query named ``hangs`` never
returns; ``READY`` is printed when it was called.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.errors import StreamingQueryException

import holdfast
from tests.spark.application import start_spark
from tests.spark.conftest import Lab, count_and_sum

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


def start(spark: SparkSession, folder: Path) -> StreamingQuery:
    called = folder / "called"

    def hang(batch: holdfast.ShardBatch) -> None:
        called.touch()
        threading.Event().wait()

    def ready(rows: DataFrame, _: int) -> None:
        rows.collect()
        print("READY", folder.name, flush=True)

    spark.conf.set("spark.holdfast.state.dir", str(folder / "durable"))
    function = hang if folder.name == "hangs" else count_and_sum
    totals = Lab(spark, folder, folder / "local").totals(func=function)
    writer = totals.writeStream.foreachBatch(ready).outputMode("update").queryName(folder.name)
    writer = writer.trigger(processingTime="200 milliseconds").option("checkpointLocation", str(folder / "first"))
    return writer.start()


def main(folder: Path, *names: str) -> None:
    # A slot is taken by the function that hangs.
    spark = start_spark(folder, {"spark.master": "local[3]"})
    queries = {name: start(spark, folder / name) for name in names}
    told = False
    while queries:
        for name, query in list(queries.items()):
            try:
                query.awaitTermination(0.1)
            except StreamingQueryException as exc:
                print("FAILED", name, str(exc).replace("\n", " "), flush=True)
                del queries[name]
        if not told and (folder / "hangs" / "called").exists():
            print("READY hangs", flush=True)
            told = True


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
