"""Initial state of queries that `savepoints.write` does not make: what they say, and the way that is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

import holdfast
from holdfast import savepoints
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.spark.savepoints.queries import CASES, UNCHECKED, Appending, counts, restored, saved, totals
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark

ONE, TWO = CASES[0], next(case for case in CASES if case.name == "two operators")


def beside_another(frame: DataFrame) -> DataFrame:
    return counts(totals(frame), ["carrier"], "changes")


def as_a_processor(frame: DataFrame) -> DataFrame:
    grouped = holdfast.stream(frame).groupBy("carrier")
    return grouped.transformWithState(Appending(), "carrier string, seen string", "update", "None", name="totals")


@pytest.mark.all
@pytest.mark.parametrize("query", cases([beside_another, as_a_processor]))
def test_a_query_that_has_other_operators_is_refused(lab: Lab, query: Callable[[DataFrame], DataFrame]) -> None:
    """By Spark, when it starts: by name, and before any row is read."""
    begin = lab.spark.createDataFrame([("AA", 5)], "carrier string, n long")
    savepoints.write(begin, lab.folder / "savepoints", "one", "totals", keys="carrier", shards=2)
    restored(lab)
    lab.feed(ONE.files()[0])
    refused = pytest.raises(StreamingQueryException, match="STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA")
    with configured(lab.spark, UNCHECKED | NEEDED), refused:
        lab.run(query(lab.source(ONE.schema)), "again")


@pytest.mark.all
def test_a_query_with_several_operators_begins_with_edited_state(lab: Lab) -> None:
    """It ran over a few rows once, was saved, and each of its tables was replaced."""
    target = lab.folder / "savepoints"
    with configured(lab.spark, UNCHECKED):
        saved(lab, TWO)
        pairs = lab.spark.createDataFrame([("ZZ", "ZRH", 1000)], "carrier string, origin string, n long")
        changes = lab.spark.createDataFrame([("ZRH", 77)], "origin string, n long")
        savepoints.edit(pairs, target, "one", "half", "pairs")
        savepoints.edit(changes, target, "half", "begin", "changes")
        lab.configure({"state.dir": str(lab.folder / "durable-again")})
        savepoints.restore(lab.spark, target, "begin", lab.folder / "again", sources="fresh")
        lab.run(TWO.query(lab.source(TWO.schema)), "again", TWO.mode)
    first = TWO.files()[:2]
    n = {(row["carrier"], row["origin"]): row["n"] for row in rows_of(lab, "pairs")}
    assert n.pop(("ZZ", "ZRH")) == 1000
    assert sum(n.values()) == sum(file.num_rows for file in first)
    assert {row["origin"]: row["n"] for row in rows_of(lab, "changes")}["ZRH"] == 77


def rows_of(lab: Lab, operator: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = holdfast.read_state(lab.spark, lab.folder / "again", operator).to_pylist()
    return found
