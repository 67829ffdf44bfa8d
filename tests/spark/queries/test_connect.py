"""The same over Spark Connect."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.spark.application import run_program
from tests.spark.conftest import Lab
from tests.tiers import cases

PROGRAM = Path(__file__).with_name("connect_query.py")


def require_each_api(found: dict[str, Any]) -> None:
    assert found["state"] == [{"key": "a", "n": 2}, {"key": "b", "n": 1}, {"key": None, "n": 1}]
    assert found["state by key"] == found["state"]
    assert found["begun"] == [{"key": "a", "n": 2}, {"key": "b", "n": 11}, {"key": None, "n": 1}]
    assert found["batch"] == [{"key": "a", "n": 2}]
    measured = [(row["operator"], row["batchId"], row["rows"], row["keys_new"]) for row in found["metrics"]]
    for what, operator, shard, batch, to_do in found["explained"]:
        assert (what, operator, batch) == (
            "what:        ValueError: no b here",
            "operator:    refusing",
            "micro-batch: 0",
        )
        assert shard.startswith("shard:       ")
        assert "correct refuse_b (connect_query.py, line " in to_do
    assert measured == [("counts", 0, 3, 3), ("counts", 1, 1, 0)]


def require_rarer_ways(found: dict[str, Any]) -> None:
    assert found["processed"] == [{"key": "a", "n": 2}, {"key": "b", "n": 1}, {"key": None, "n": 1}]
    assert len(found["refused"]) == 4
    assert all("must be grouped by columns" in text for text in found["refused"])
    assert all(row["n"] >= 1 for row in found["woken"]), "each timer was due after the first micro-batch"
    assert [row["key"] for row in found["woken"]] == ["a", "b", None]
    for what, operator, _, batch, _ in found["twice"]:
        assert what.startswith("what:        ConflictError: two operators of this query have the same name: pass each")
        assert (operator, batch) == ("operator:    CountRows", "micro-batch: 0")
    assert found["twice in one line"].startswith("two operators of this query have the same name: pass each its own")


def require_any_evaluation(found: dict[str, Any]) -> None:
    """However often a micro-batch is evaluated, and from wherever."""
    for query in ("one", "two"):
        batches = [[["a", 1], ["b", 1], [None, 1]], [["a", 2]], [["a", 3], ["c", 1]]]
        ways = 6 if query == "one" else 2
        assert found[query] == [[rows] * ways for rows in batches]
        assert found[f"state of {query}"] == [
            {"key": "a", "n": 3}, {"key": "b", "n": 1}, {"key": "c", "n": 1}, {"key": None, "n": 1},
        ]  # fmt: skip


def require_savepoints(found: dict[str, Any]) -> None:
    """Made, read and restored, with other shards."""
    assert found["saved"] == [{"key": "a", "n": 2}, {"key": "b", "n": 1}, {"key": None, "n": 1}]
    assert found["restored"] == found["original"]
    assert found["original"] == [
        {"key": "a", "n": 3}, {"key": "b", "n": 1}, {"key": "c", "n": 1}, {"key": None, "n": 1},
    ]  # fmt: skip


def require_drained(found: dict[str, Any]) -> None:
    """All that is open is closed, and what is restored takes input that is no later than before."""
    assert found["drained"] == [["ann", 2], ["bob", 1], ["cid", 2]]
    assert [row for row in found["drained"] if row not in found["before"]], "something was open"
    assert found["again"] == [["cid", 1]]


def require_shown_once(found: dict[str, Any]) -> None:
    """Each micro-batch, also the one that Spark repeats."""
    assert found["shown"] == [
        {"key": "", "n": 1}, {"key": "a", "n": 1}, {"key": "a", "n": 2}, {"key": "a", "n": 3}, {"key": "b", "n": 1},
        {"key": "c", "n": 1},
    ]  # fmt: skip


REQUIRED = {
    "each API": require_each_api,
    "rarer ways": require_rarer_ways,
    "in foreachBatch": require_any_evaluation,
    "savepoints": require_savepoints,
    "drain": require_drained,
    "sink": require_shown_once,
}
MARKS = {"each API": pytest.mark.since("4.1"), "rarer ways": pytest.mark.since("4.1"), "drain": pytest.mark.all}


@pytest.mark.spark
@pytest.mark.slow(30)
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="needs the extra 'connect'")
@pytest.mark.parametrize("part", cases([pytest.param(part, marks=MARKS.get(part, ())) for part in REQUIRED]))
def test_state_over_spark_connect(java_home: Path, tmp_path: Path, part: str) -> None:
    lab = Lab(None, tmp_path, tmp_path / "local")  # type: ignore[arg-type]
    lab.feed([("a", 1), ("b", 2), (None, 3)])
    lab.feed([("a", 1)])
    lab.feed([("a", 1), ("c", 1)])
    (tmp_path / "more").mkdir()
    (tmp_path / "input/002.parquet").rename(tmp_path / "more/002.parquet")
    REQUIRED[part](json.loads(run_program(PROGRAM, tmp_path, part)[0]))
