"""The same over Spark Connect."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.spark.application import run_program
from tests.spark.conftest import Lab

PROGRAM = Path(__file__).with_name("connect_query.py")


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="needs the extra 'connect'")
def test_state_over_spark_connect(java_home: Path, tmp_path: Path) -> None:
    lab = Lab(None, tmp_path, tmp_path / "local")  # type: ignore[arg-type]
    lab.feed([("a", 1), ("b", 2), (None, 3)])
    lab.feed([("a", 1)])
    lab.feed([("a", 1), ("c", 1)])
    (tmp_path / "more").mkdir()
    (tmp_path / "input/002.parquet").rename(tmp_path / "more/002.parquet")
    found = json.loads(run_program(PROGRAM, tmp_path)[0])
    assert found["state"] == [{"key": "a", "n": 2}, {"key": "b", "n": 1}, {"key": None, "n": 1}]
    assert found["state by key"] == found["state"]
    assert all(row["n"] >= 1 for row in found["woken"]), "each timer was due after the first micro-batch"
    assert [row["key"] for row in found["woken"]] == ["a", "b", None]
    for query in ("one", "two"):
        batches = [[["a", 1], ["b", 1], [None, 1]], [["a", 2]], [["a", 3], ["c", 1]]]
        ways = 6 if query == "one" else 2
        assert found[query] == [[rows] * ways for rows in batches], "however often a micro-batch is evaluated"
        assert found[f"state of {query}"] == [
            {"key": "a", "n": 3}, {"key": "b", "n": 1}, {"key": "c", "n": 1}, {"key": None, "n": 1},
        ]  # fmt: skip
    assert found["batch"] == [{"key": "a", "n": 2}]
