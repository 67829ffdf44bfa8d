"""The session that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.mark.spark
def test_shared_session_runs(spark: object, java_home: Path) -> None:
    assert spark.range(10).count() == 10  # type: ignore[attr-defined]
    assert os.environ["JAVA_HOME"] == str(java_home)
