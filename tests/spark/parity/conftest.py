"""What the tests of parity share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.repetitions import LONG, turn_of
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
    """Run half of these tests on one engine of ours, a quarter of them on Spark's own, unless the profile is long.

    The other half, other engines and another quarter have their turn in the next run. What a test expects stands in
    the test, and holds for each engine alone: Spark shows that the test is right. `test_scripts.py` compares with Spark
    what it plays, in every run. The smoke tests of another Spark leave nothing out.
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
        elif turn_of(name) % 4:
            item.add_marker(pytest.mark.long)
    for name, candidates in ours.items():
        quick = [item for item in candidates if not item.get_closest_marker("long")]
        other_run, turn = turn_of(name) % 2, turn_of(name) // 2
        for item in quick:
            if other_run or item is not quick[turn % len(quick)]:
                item.add_marker(pytest.mark.long)
