"""The Kafka sink keeps the contract: over a login, and with a topic that rows name."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.spark_integration.sinks.kafka.sink import KafkaSink
from holdfast.spark_integration.sinks.two_phase_sink import TwoPhaseSink
from tests.contract.conftest import SampledContract
from tests.read_kafka import committed
from tests.servers.kafka import Kafka
from tests.tiers import ALL

pytestmark = [pytest.mark.kafka, pytest.mark.slow(90)]


class TestKafka(SampledContract):
    @pytest.fixture
    def sink(self, kafka: Kafka) -> TwoPhaseSink:
        self.kafka = kafka
        return KafkaSink(f"sink-{clock.new_id()}", kafka.add_topic(2), timeout_s=20)

    @pytest.fixture
    def options(self, kafka: Kafka) -> Mapping[str, str]:
        return kafka.sasl_options()

    def schema(self) -> pa.Schema:
        return pa.schema({"key": pa.string(), "value": pa.string()})

    def rows(self, n: int, seed: int, attempt: int = 0) -> pa.Table:
        keys = [f"{seed}-{i}" for i in range(n)]
        return pa.table([keys, [f"attempt {attempt}" for _ in keys]], schema=self.schema())

    def unfit_schemas(self) -> list[pa.Schema]:
        value = self.schema().get_field_index("value")
        other = self.schema().set(value, pa.field("value", pa.int64()))
        return [other, self.schema().remove(value), self.schema().append(pa.field("word", pa.string()))]

    def shown(self, sink: TwoPhaseSink) -> pa.Table:
        assert isinstance(sink, KafkaSink)
        assert sink.topic is not None
        found = committed(self.kafka, sink.topic)
        rows = [{"key": (one.key() or b"").decode(), "value": (one.value() or b"").decode()} for one in found]
        return pa.Table.from_pylist(rows, self.schema())

    @pytest.fixture(autouse=True)
    def _name(self, request: pytest.FixtureRequest) -> None:
        self.name = request.node.originalname

    def restart_target(self) -> None:
        # It takes ten seconds on a machine that does other things, too.
        if ALL or self.name == "test_prepared_survives_worker_driver_and_server":
            self.kafka.restart()
