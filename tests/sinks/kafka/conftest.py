"""A sink with a topic of its own."""

from __future__ import annotations

import pytest

from tests.servers.kafka import Kafka
from tests.sinks.kafka.lab import Lab


@pytest.fixture
def lab(kafka: Kafka) -> Lab:
    return Lab(kafka, {"bootstrap.servers": kafka.servers})
