"""What the tests of processors share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.parity.engines import Open, trial
from tests.spark.processors.ways import Run, Way

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.processors.engines import ProcessorEngine


@pytest.fixture
def run_on(spark: SparkSession, tmp_path: Path, local_state: Path) -> Open:
    """Return a function that opens a trial on an engine."""

    def opened(engine: ProcessorEngine, **conf: str) -> Any:
        return trial(spark, engine, tmp_path / engine.name, local_state, conf)

    return opened


@pytest.fixture
def run(run_on: Open) -> Run:
    """Return a function that runs a processor over a table, and returns what it emits."""

    def run_it(way: Way, *arguments: Any, conf: dict[str, str] | None = None) -> list[tuple[Any, ...]]:
        with run_on(way.engine, **(conf or {})) as on:
            return way.rows(on, *arguments)

    return run_it
