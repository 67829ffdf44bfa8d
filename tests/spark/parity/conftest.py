"""What the tests of parity share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.parity.engines import Engine, Open, trial

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def run_on(spark: SparkSession, tmp_path: Path, local_state: Path) -> Open:
    """Return a function that opens a trial on an engine."""

    def opened(engine: Engine, **conf: str) -> Any:
        return trial(spark, engine, tmp_path / engine.name, local_state, conf)

    return opened
