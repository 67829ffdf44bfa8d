"""What the tests of parity share."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.parity.engines import SPARK, Engine, Open, trial
from tests.tiers import ALL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def run_on(spark: SparkSession, tmp_path: Path, local_state: Path) -> Open:
    """Return a function that opens a trial on an engine."""

    def opened(engine: Engine, **conf: str) -> Any:
        return trial(spark, engine, tmp_path / engine.name, local_state, conf)

    return opened


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep half of these tests in ``make test``, on one engine of ours, and a quarter of them on Spark's own.

    What a test expects stands in the test, and holds for each engine alone: Spark shows that the test is right.
    `test_scripts.py` compares with Spark what it plays. The smoke tests of another Spark leave nothing out.
    """
    if ALL or config.option.markexpr == "smoke":
        return
    ours: dict[str, list[pytest.Item]] = {}
    for item in items:
        engine = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
        if engine is None or item.path.parent != Path(__file__).parent or item.path.name == "test_scripts.py":
            continue
        # Without the engine: of all these one is chosen.
        name = item.nodeid.replace(engine.name, "")
        if engine is not SPARK:
            ours.setdefault(name, []).append(item)
        elif zlib.crc32(name.encode()) % 4:
            item.add_marker(pytest.mark.all)
    for name, candidates in ours.items():
        quick = [item for item in candidates if not item.get_closest_marker("all")]
        number = zlib.crc32(name.encode())
        for item in quick:
            if number % 2 or item is not quick[number // 2 % len(quick)]:
                item.add_marker(pytest.mark.all)
