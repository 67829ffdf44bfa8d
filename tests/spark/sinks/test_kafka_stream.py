"""A stream of alerts to Kafka in a real Spark: each is there once for consumers of committed messages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast.examples.sinks import alerts
from tests.read_kafka import committed
from tests.servers.kafka import Kafka

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
