"""What the tests of processors share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.spark.parity.engines import Open
from tests.spark.processors.ways import Run, Way


@pytest.fixture
def run(run_on: Open) -> Run:
    """Return a function that runs a processor over a table, and returns what it emits."""

    def run_it(way: Way, *arguments: Any, conf: dict[str, str] | None = None) -> list[tuple[Any, ...]]:
        with run_on(way.engine, **(conf or {})) as on:
            return way.rows(on, *arguments)

    return run_it
