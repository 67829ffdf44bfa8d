"""A sink by each of the two ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.spark_integration.sinks.postgres import connecting
from tests.servers.postgres import Postgres
from tests.sinks.postgres.attempts import Case, case


@pytest.fixture
def appending(postgres: Postgres) -> Case:
    """Return a sink that prepares transactions."""
    return case(postgres)


@pytest.fixture
def updating(postgres: Postgres) -> Case:
    """Return a sink that updates by a key, through staging tables."""
    return case(postgres, "k text PRIMARY KEY, n bigint", keys=["k"])


@pytest.fixture(params=["appending", "updating"])
def either(request: pytest.FixtureRequest) -> Case:
    """Return a sink of each way in turn."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Case)
    return found


@pytest.fixture(autouse=True)
def _no_connection_is_left() -> Iterator[None]:
    yield
    connecting.close_idle()
