"""Running totals in PostgreSQL: one row per user, which each micro-batch updates exactly once.

::

    make postgres                                            # and in another shell, with the variables that it prints:
    python -m holdfast.examples.sinks.running_total

Server and credentials come from libpq's environment (``PGHOST``, ``PGPASSWORD`` …), or from settings::

    spark.holdfast.sink.totals.host = db.example.com
    spark.holdfast.sink.totals.password = …

The table mirrors the totals in the state. Kill the program at any point and start it again with the same folder: the
table matches the state.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

import holdfast
from holdfast import sinks
from holdfast.examples.stateful.local import example_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

SPENT = "user_name string, cents long"
TOTALS = "user_name string, payments long, cents long"
TABLE = "running_totals"


def add(batch: holdfast.ShardBatch) -> dict[str, pa.Array]:
    """Add payments to each user's totals; return the new totals."""
    old = batch.state.get(default=0)
    payments = pc.add(old["payments"], batch.groups.count())
    cents = pc.add(old["cents"], batch.groups.sum("cents"))
    batch.state.put(payments=payments, cents=cents)
    return {"payments": payments, "cents": cents}


def running_totals(spent: DataFrame) -> DataStreamWriter:
    """Return the writer of a query that keeps each user's totals in the table."""
    totals = (
        holdfast.stream(spent)
        .groupBy("user_name")
        .applyInArrowWithState(add, TOTALS, "payments long, cents long", "update", name="totals")
    )
    sink = sinks.postgres("totals", TABLE, keys=["user_name"], create=True)
    return totals.writeStream.outputMode("update").foreachBatch(sinks.exactly_once(sink))


def main(folder: Path) -> None:
    """Run two micro-batches, then print the table."""
    with example_session() as spark:
        spark.conf.set("spark.holdfast.state.dir", f"{folder}/state")
        rows = [("ann", 500), ("bob", 250), ("ann", 1000)], [("bob", 50), ("eve", 7)]
        for number, spent in enumerate(rows):
            path = f"{folder}/spent/{number}"
            if not Path(path).exists():
                spark.createDataFrame(spent, SPENT).coalesce(1).write.parquet(path)
        stream = spark.readStream.schema(SPENT).option("maxFilesPerTrigger", 1).parquet(f"{folder}/spent/*")
        writer = running_totals(stream).option("checkpointLocation", f"{folder}/checkpoint")
        writer.trigger(availableNow=True).start().awaitTermination()
    with psycopg.connect() as connection:
        for row in connection.execute(f"SELECT user_name, payments, cents FROM {TABLE} ORDER BY 1"):  # noqa: S608
            print("{:8} {:3} payments {:8} cents".format(*row))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as own:
            main(Path(own))
