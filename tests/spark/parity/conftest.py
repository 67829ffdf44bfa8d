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
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run each of these tests on one engine of ours, and a quarter of them on Spark's own, unless the profile is long.

    Other engines, and another quarter, have their turn in each run. What a test expects stands in the test, and holds
    for each engine alone: Spark shows that the test is right. `test_scripts.py` compares with Spark what it plays, in
    every run. The smoke tests of another Spark leave nothing out.
    """
    if LONG or config.option.markexpr == "smoke":
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
        elif _turn(name, 4):
            item.add_marker(pytest.mark.long)
    for name, candidates in ours.items():
        quick = [item for item in candidates if not item.get_closest_marker("long")]
        for item in quick:
            if item is not quick[_turn(name, len(quick))]:
                item.add_marker(pytest.mark.long)


def _turn(name: str, among: int) -> int:
    """Return whose turn it is in this run: the tests of a run differ, and so do the runs."""
    return (zlib.crc32(name.encode()) + seed()) % among
