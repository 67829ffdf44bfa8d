"""Alerts to Kafka: each unusual payment is reported exactly once, whatever is killed.

::

    make kafka                                      # in another terminal; run the export line that it prints
    python -m holdfast.examples.sinks.alerts

A payment is unusual if it exceeds ten times the card's average so far. Alerts are messages with the card as key and
JSON as value; consumers set ``isolation.level=read_committed``. Stop the program and start it with the
``ALERTS_FOLDER`` that it printed: it continues without repeating an alert.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

import holdfast
from holdfast import sinks
from holdfast.examples.stateful.local import example_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

TIMES = 10


def unusual_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Compare each card's largest payment with its earlier payments."""
    old = batch.state.get(default=0)
    paid, n = old["paid"], old["n"]
    batch.state.put(paid=pc.add(paid, batch.groups.sum("amount")), n=pc.add(n, batch.groups.count()))
    largest = batch.groups.max("amount")
    is_unusual = pc.and_(pc.greater(n, 0), pc.greater(pc.multiply(largest, n), pc.multiply(paid, TIMES)))
    alerts = batch.keys.append_column("amount", largest).append_column("paid_before", paid)
    return alerts.filter(is_unusual)


def alerts(payments: DataFrame) -> DataFrame:
    """Return messages about unusual payments; `payments` has the columns card and amount."""
    found = (
        holdfast.stream(payments)
        .groupBy("card")
        .applyInArrowWithState(
            unusual_of_shard, "card string, amount long, paid_before long", "paid long, n long", "append", name="cards"
        )
    )
    return found.selectExpr("card AS key", "to_json(struct(*)) AS value")


def start(payments: DataFrame, topic: str, servers: str, checkpoint: str) -> StreamingQuery:
    """Write each alert exactly once to a topic."""
    sink = sinks.kafka("alerts", topic, servers=servers)
    writer = alerts(payments).writeStream.outputMode("append").option("checkpointLocation", checkpoint)
    return writer.foreachBatch(sinks.exactly_once(sink)).start()


def main() -> None:
    """Generate payments, some of them unusual, until Ctrl-C."""
    folder = os.environ.get("ALERTS_FOLDER") or tempfile.mkdtemp(prefix="holdfast-alerts-")
    with example_session() as spark:
        spark.conf.set("spark.holdfast.state.dir", f"{folder}/durable")
        numbers = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
        payments = numbers.selectExpr(
            "concat('card-', value % 50) AS card", "CAST(if(value % 997 = 0, 5000, 10) AS long) AS amount"
        )
        query = start(payments, os.environ["KAFKA_TOPIC"], os.environ["KAFKA_SERVERS"], f"{folder}/query")
        print(f"to continue later, set ALERTS_FOLDER={folder}")
        query.awaitTermination()


if __name__ == "__main__":
    main()
