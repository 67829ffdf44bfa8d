"""What more than one module of queries needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED


@pytest.fixture
def state_store(lab: Lab) -> Iterator[None]:
    """Give Spark's operator of processors the state store that it needs."""
    with configured(lab.spark, NEEDED):
        yield
