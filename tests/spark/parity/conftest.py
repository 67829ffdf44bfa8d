"""What the tests of parity share."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.repetitions import LONG, seed
from tests.spark.parity.engines import SPARK, Engine, Open, trial

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def run_on(spark: SparkSession, tmp_path: Path, local_state: Path) -> Open:
    """Return a function that opens a trial on an engine."""

    def opened(engine: Engine, **conf: str) -> Any:
        return trial(spark, engine, tmp_path / engine.name, local_state, conf)

    return opened


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ask Spark's own operator in a quarter of these tests, another quarter in each run, unless the profile is long.

    What a test expects stands in the test, and holds for each engine alone: Spark shows that the test is right.
    `test_scripts.py` compares with Spark what it plays, in every run.
    """
    for item in items:
        asked = getattr(item, "callspec", None) and item.callspec.params.get("engine") is SPARK
        if asked and item.path.parent == Path(__file__).parent and item.path.name != "test_scripts.py":
            its_turn = (zlib.crc32(item.nodeid.encode()) + seed()) % 4 == 0
            if not (LONG or its_turn or item.get_closest_marker("smoke")):
                item.add_marker(pytest.mark.long)
