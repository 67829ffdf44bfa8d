"""What a consumer of Kafka sees that reads committed messages only, up to the end of a topic."""

from __future__ import annotations

import uuid

import confluent_kafka as client

from tests.servers.kafka import Kafka


def committed(server: Kafka, topic: str, isolation: str = "read_committed") -> list[client.Message]:
    """Return all messages of a topic, by partition, up to the last that is stable."""
    settings: dict[str, str | int | bool] = {
        "bootstrap.servers": server.servers,
        "group.id": f"reader-{uuid.uuid4().hex}",
        "isolation.level": isolation,
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 10,
        "fetch.error.backoff.ms": 0,
    }
    consumer = client.Consumer(settings)
    try:
        partitions = list(consumer.list_topics(topic, 30).topics[topic].partitions)
        consumer.assign([client.TopicPartition(topic, partition, client.OFFSET_BEGINNING) for partition in partitions])
        found, ended = [], set[int]()
        while len(ended) < len(partitions):
            message = consumer.poll(30)
            assert message is not None, "no answer from Kafka"
            error = message.error()
            if error is None:
                found.append(message)
            else:
                assert error.code() == client.KafkaError._PARTITION_EOF, error
                ended.add(int(message.partition() or 0))
        return found
    finally:
        consumer.close()
