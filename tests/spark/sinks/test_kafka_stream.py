"""A stream of alerts to Kafka in a real Spark: each is there once for consumers of committed messages."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from holdfast import clock, sinks
from holdfast.examples.sinks import alerts
from tests.read_kafka import committed, transactional_ids
from tests.servers.kafka import PASSWORD, Kafka

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow(60)]


def numbers(session: SparkSession, folder: Path) -> DataFrame:
    """Return a stream of the numbers that `feed` wrote, a file a micro-batch."""
    (folder / "input").mkdir(exist_ok=True)
    return (
        session.readStream.schema("card string, amount long")
        .option("maxFilesPerTrigger", 1)
        .json(str(folder / "input"))
    )


def feed(folder: Path, number: int, payments: list[tuple[str, int]]) -> None:
    (folder / "input").mkdir(exist_ok=True)
    lines = (json.dumps({"card": card, "amount": amount}) for card, amount in payments)
    (folder / "new").write_text("\n".join(lines))
    # Spark takes the oldest file first.
    os.utime(folder / "new", (1_700_000_000 + number, 1_700_000_000 + number))
    (folder / "new").rename(folder / "input" / f"{number}.json")


def test_alerts_are_there_once_over_restarts(session: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    topic = kafka.add_topic(3)
    feed(tmp_path, 0, [("a", 10), ("b", 10)])
    for number in range(1, 4):
        feed(tmp_path, number, [("a", 1000**number), ("b", 10)])
        query = alerts.start(numbers(session, tmp_path), topic, kafka.servers, str(tmp_path / "query"))
        query.processAllAvailable()
        query.stop()
    found = [(message.key(), json.loads(message.value() or b"")["amount"]) for message in committed(kafka, topic)]
    assert sorted(found, key=lambda one: int(one[1])) == [(b"a", 1000), (b"a", 1000**2), (b"a", 1000**3)]


@pytest.mark.all
def test_a_repeat_shows_the_rows_that_were_decided(session: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    """Spark forgets that it ended a micro-batch, and repeats it with a function whose rows differ each time."""
    from pyspark.sql import functions as f

    topic, checkpoint, name = kafka.add_topic(2), tmp_path / "query", f"sink-{clock.new_id()}"
    for option, value in kafka.sasl_options().items():
        session.conf.set(f"spark.holdfast.sink.{name}.{option}", value)
    differs = f.udf(lambda _: random.randbytes(8).hex()).asNondeterministic()
    rows = (
        numbers(session, tmp_path).select(f.col("card").alias("key"), differs("amount").alias("value")).repartition(2)
    )

    def run() -> list[tuple[bytes, bytes]]:
        sink = sinks.kafka(name, topic)
        writer = rows.writeStream.option("checkpointLocation", str(checkpoint))
        query = writer.foreachBatch(sinks.exactly_once(sink)).start()
        query.processAllAvailable()
        query.stop()
        return sorted((one.key() or b"", one.value() or b"") for one in committed(kafka, topic))

    feed(tmp_path, 0, [(f"card-{i}", 1) for i in range(50)])
    first = run()
    assert len(first) == 50
    for left in (checkpoint / "commits").glob("*0*"):
        left.unlink()
    assert run() == first
    feed(tmp_path, 1, [("later", 1)])
    assert run()[:50] == first
    durable = b"".join(path.read_bytes() for path in (tmp_path / "durable").rglob("*") if path.is_file())
    assert PASSWORD.encode() not in durable
    for option in kafka.sasl_options():
        session.conf.unset(f"spark.holdfast.sink.{name}.{option}")


@pytest.mark.all
def test_a_deleted_state_directory_is_noticed_by_the_mark(session: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    """Spark would repeat a micro-batch that Kafka already shows."""
    topic = kafka.add_topic()
    feed(tmp_path, 0, [("a", 1)])
    rows = numbers(session, tmp_path).selectExpr("card AS value")
    sink = sinks.kafka(f"sink-{clock.new_id()}", topic, servers=kafka.servers)

    def run() -> None:
        writer = rows.writeStream.option("checkpointLocation", str(tmp_path / "query"))
        query = writer.foreachBatch(sinks.exactly_once(sink)).start()
        query.processAllAvailable()
        query.stop()

    run()
    shutil.rmtree(tmp_path / "durable")
    for left in (tmp_path / "query" / "commits").glob("*0*"):
        left.unlink()
    with pytest.raises(StreamingQueryException, match="the target shows a micro-batch"):
        run()
    assert len(committed(kafka, topic)) == 1


@pytest.mark.all
def test_transactional_ids_follow_partitions(session: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    """A coordinator keeps each for a week, in memory."""
    topic, sink = kafka.add_topic(), sinks.kafka(f"sink-{clock.new_id()}", servers=kafka.servers)
    rows = numbers(session, tmp_path).selectExpr(f"'{topic}' AS topic", "card AS value").repartition(3)
    for number in range(6):
        feed(tmp_path, number, [(f"{number}-{i}", 1) for i in range(30)])
    writer = rows.writeStream.option("checkpointLocation", str(tmp_path / "query"))
    query = writer.foreachBatch(sinks.exactly_once(sink)).start()
    query.processAllAvailable()
    query.stop()
    assert len(committed(kafka, topic)) == 180
    assert len(transactional_ids(kafka, f"holdfast.{sink.name}.{query.id}.")) == 6
