"""A Delta table that mirrors a query's state: one row per key, as of whole micro-batches.

::

    python -m holdfast.examples.sinks.state_image <folder of JSON lines: account, amount> <table> <working folder>

Each micro-batch replaces the changed totals in one Delta transaction, so readers see the totals after a whole
micro-batch. A query that was killed and restarted continues exactly where it stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql.streaming.state import GroupState

import holdfast
from holdfast import sinks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def running_total(key: Any, frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Add an account's amounts to its total."""
    payments, total = state.get if state.exists else (0, 0)
    for frame in frames:
        payments, total = payments + len(frame), total + int(frame["amount"].sum())
    state.update((payments, total))
    yield pd.DataFrame({"account": [key[0]], "payments": [payments], "total": [total]})


def image_of_totals(spark: SparkSession, source: str, table: str, folder: str) -> DataStreamWriter:
    """Return the query, to be started with ``start()``."""
    spark.conf.set("spark.holdfast.state.dir", f"{folder}/state")
    amounts = spark.readStream.schema("account string, amount long").json(source)
    totals = (
        holdfast.stream(amounts)
        .groupBy("account")
        .applyInPandasWithState(
            running_total,
            "account string, payments long, total long",
            "payments long, total long",
            "update",
            "NoTimeout",
            name="totals",
        )
    )
    image = sinks.delta("image", table, keys=["account"], create=True)
    writer = totals.writeStream.outputMode("update").foreachBatch(sinks.exactly_once(image))
    return writer.option("checkpointLocation", f"{folder}/query")


if __name__ == "__main__":
    from pyspark.sql import SparkSession

    image_of_totals(SparkSession.builder.getOrCreate(), *sys.argv[1:4]).start().awaitTermination()
