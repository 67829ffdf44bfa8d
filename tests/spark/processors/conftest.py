"""What the tests of processors share."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.parity.engines import Open, trial
from tests.spark.processors.ways import Run, Way
from tests.tiers import ALL

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a third of these tests in ``make test``, and a third of those on Spark's own operator.

    What a test expects stands in the test, and holds for each engine alone: Spark shows that the test is right. Probes
    and scripts share one query of an engine, and run always. The smoke tests of another Spark leave nothing out.
    """
    if ALL or config.option.markexpr == "smoke":
        return
    for item in items:
        if item.path.parent != Path(__file__).parent or item.path.name in {"test_probes.py", "test_scripts.py"}:
            continue
        given = item.callspec.params if hasattr(item, "callspec") else {}
        runs_on = given.get("engine") or given.get("way")
        if runs_on is None:
            continue
        number = zlib.crc32(item.nodeid.replace(runs_on.name, "").encode())
        if number % 3 or (runs_on.is_spark and number % 9):
            item.add_marker(pytest.mark.all)
