"""A sink with a topic of its own."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.spark_integration.sinks.kafka.sink import KafkaSink
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery, SinkTransaction, begin
from tests.read_kafka import committed
from tests.servers.kafka import Kafka


@pytest.fixture
def lab(kafka: Kafka) -> Lab:
    return Lab(kafka, {"bootstrap.servers": kafka.servers})


SCHEMA = pa.schema({"value": pa.string()})


class Lab:
    """One sink with a topic of its own."""

    def __init__(self, server: Kafka, options: Mapping[str, str], timeout_s: float = 20) -> None:
        self.server, self.topic = server, server.add_topic()
        self.sink = KafkaSink(f"sink-{clock.new_id()}", self.topic, timeout_s=timeout_s)
        self.query = SinkQuery(self.sink.name, clock.new_uuid(), options=options)

    def begin(self, batch_id: int = 0, schema: pa.Schema = SCHEMA, spare: Handle | None = None) -> SinkTransaction:
        return begin(self.sink, SinkAttempt(self.query, batch_id, 0, clock.new_id() + clock.new_id()), schema, spare)

    def prepare(self, *values: str, batch_id: int = 0, spare: Handle | None = None) -> Handle:
        transaction = self.begin(batch_id, spare=spare)
        transaction.write(pa.record_batch({"value": pa.array(values, pa.string())}))
        return transaction.prepare()

    def shown(self) -> list[str]:
        return [(message.value() or b"").decode() for message in committed(self.server, self.topic)]
