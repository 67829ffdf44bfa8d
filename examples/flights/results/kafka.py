"""Results as messages in an existing topic, where they remain."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from holdfast import sinks
from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.examples.flights.results.base import COLUMNS, PATIENCE_S, SINK_OPTIONS, SinkResults

if TYPE_CHECKING:
    import confluent_kafka
    from pyspark.sql import DataFrame


class KafkaResults(SinkResults):
    """JSON messages with the subject's kind and name as key."""

    called, reader = "Kafka topic", "a read_committed consumer"

    def __init__(self, output: Path, run: str, options: Mapping[str, str]) -> None:
        servers = os.environ.get("KAFKA_SERVERS")
        super().__init__(output, run, {**({"bootstrap.servers": servers} if servers else {}), **options})
        self.topic = os.environ.get("KAFKA_TOPIC", "")
        # The first offset of each partition; earlier messages are not the demo's.
        self._begin: dict[int, int] = {}

    @property
    def where(self) -> str:
        return f"{self.called} {self.topic}"

    def prepare(self) -> None:
        if not self.topic or not self.options.get("bootstrap.servers"):
            raise self._nowhere("KAFKA_SERVERS or KAFKA_TOPIC is not set")
        super().prepare()
        with self._consumer() as (consumer, partitions):
            for one in partitions:
                _, self._begin[one.partition] = consumer.get_watermark_offsets(one, PATIENCE_S)

    def sink(self) -> sinks.TwoPhaseSink:
        return sinks.kafka(self.name, self.topic)

    def shape(self, rows: DataFrame) -> DataFrame:
        return rows.selectExpr("concat_ws('/', kind, name) AS key", "to_json(struct(*)) AS value")

    def rows(self) -> pd.DataFrame:
        with self._consumer() as (consumer, partitions):
            return pd.DataFrame([json.loads(value) for value in _values(consumer, partitions)], columns=list(COLUMNS))

    def remove(self, query_id: str | None) -> None:
        """Abort leftovers and remove the sink's consumer group; messages remain in the user's topic."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        super().remove(query_id)
        mark = f"holdfast.{self.name}"
        # Kept in a variable: a request fails when its client is garbage collected.
        admin = AdminClient({**self.options, "log_level": 0})
        try:
            with suppress(KafkaException):  # there is none if the query has not started
                admin.delete_consumer_groups([mark])[mark].result(PATIENCE_S)
        except TimeoutError:
            raise UnavailableError("Kafka does not answer", waited_s=PATIENCE_S, consumer_group=mark) from None

    @contextmanager
    def _consumer(self) -> Iterator[tuple[confluent_kafka.Consumer, Sequence[confluent_kafka.TopicPartition]]]:
        """Yield a consumer and the topic's partitions, starting at the demo's messages."""
        import confluent_kafka as kafka

        ours = {
            "group.id": self.name,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
        consumer = kafka.Consumer({**self.options, **ours})
        try:
            topic = consumer.list_topics(self.topic, PATIENCE_S).topics[self.topic]
            if topic.error is not None:
                raise self._nowhere(topic.error.str())
            yield consumer, [kafka.TopicPartition(self.topic, n, self._begin.get(n, 0)) for n in topic.partitions]
        except kafka.KafkaException as exc:
            raise self._nowhere(exc.args[0].str()) from None
        finally:
            consumer.close()

    def _nowhere(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            "the demo found no Kafka: `make kafka` starts a broker and prints what to type; or set KAFKA_SERVERS and "
            f"KAFKA_TOPIC, and other options of your brokers by --conf {SINK_OPTIONS}security.protocol=… and so on",
            problem=problem,
            servers=self.options.get("bootstrap.servers"),
            topic=self.topic or None,
        )


def _values(
    consumer: confluent_kafka.Consumer, partitions: Sequence[confluent_kafka.TopicPartition]
) -> Iterator[bytes]:
    """Yield the values of all committed messages."""
    from confluent_kafka import KafkaError

    consumer.assign(list(partitions))
    ended = set[int | None]()
    while len(ended) < len(partitions):
        messages = consumer.consume(10_000, PATIENCE_S)
        if not messages:
            raise UnavailableError("Kafka does not answer", waited_s=PATIENCE_S)
        for message in messages:
            error = message.error()
            if error is None:
                yield message.value() or b""
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                ended.add(message.partition())
            else:
                raise UnavailableError("Kafka does not return the topic's messages", problem=error.str())
