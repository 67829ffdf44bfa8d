"""What Kafka shows: to a consumer of committed messages, up to the end of a topic; and of transactional ids."""

from __future__ import annotations

import uuid

import confluent_kafka as client

from holdfast.spark_integration.sinks.kafka import protocol
from holdfast.spark_integration.sinks.kafka.brokers import Cluster
from holdfast.spark_integration.sinks.kafka.options import ClientOptions
from holdfast.spark_integration.sinks.kafka.protocol import TransactionDescription
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


def transactional_ids(server: Kafka, prefix: str) -> dict[str, TransactionDescription]:
    """Return all transactional ids that begin so and that coordinators remember."""
    options = ClientOptions.of({}, server.servers)
    with Cluster(options.servers(), options.security(), patience_ms=10_000) as cluster:
        request = protocol.list_transactions([])
        listed = cluster.ask_nodes(request.name, lambda _: request)
        return cluster.describe([name for _, names in listed for name, _ in names if name.startswith(prefix)])
