"""Restored queries with other operators: nothing begins without state but by consent; initial state of several."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupState

import holdfast
from holdfast import savepoints
from holdfast.errors import InvalidArgumentError, NotFoundError
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.spark.savepoints.queries import CASES, UNCHECKED, Appending, counts, restored, saved, totals
from tests.tiers import cases

pytestmark = pytest.mark.spark

ONE, TWO = CASES[0], next(case for case in CASES if case.name == "two operators")


def seen(files: list[pa.Table], column: str = "carrier") -> dict[str, int]:
    rows = [key for file in files for key in file[column].to_pylist()]
    return {key: rows.count(key) for key in set(rows)}


@pytest.mark.all
def test_an_operator_that_nobody_named_does_not_begin_without_state(lab: Lab) -> None:
    """The typo in a name, where Spark's state has no pointers that would tell: it names the restored operators."""
    (later, *_) = saved(lab, ONE)
    lab.feed(later)
    restored(lab, reset=["totals"])
    with pytest.raises(StreamingQueryException, match=r"without state for this operator.*operator=totls restored=none"):
        lab.run(totals(lab.source(ONE.schema), "totls"), "again")
    lab.configure({"restore.allowNew": "other, totls"})
    (batch,) = lab.run(totals(lab.source(ONE.schema), "totls"), "again")
    assert {row["carrier"]: row["n"] for row in batch} == seen([later])


@pytest.mark.all
def test_an_operator_may_begin_without_state_when_the_restore_says_so(lab: Lab) -> None:
    """Under its own name or another one, in its place; the other operator goes on."""
    with configured(lab.spark, UNCHECKED):
        (later, *_) = saved(lab, TWO)
        lab.feed(later)
        name = cases(["pairs", "fresh"])[0]
        restored(lab, reset=["pairs"], rename={"pairs": name}, shards=3)
        frame = counts(lab.source(TWO.schema), ["carrier", "origin"], name)
        lab.run(counts(frame, ["origin"], "changes"), "again")
        assert (lab.folder / f"durable-again/{name}/operator").exists()
        assert sum(n_of(lab, "again", name)) == later.num_rows
        # It counts how often a pair's count has changed: once for each pair and micro-batch.
        assert sum(n_of(lab, "again", "changes")) == sum(
            len(set(zip(file["carrier"].to_pylist(), file["origin"].to_pylist(), strict=True)))
            for file in TWO.files()[:3]
        )


def n_of(lab: Lab, query: str, operator: str) -> list[int]:
    rows: list[int] = holdfast.read_state(lab.spark, lab.folder / query, operator)["n"].to_pylist()
    return rows


@pytest.mark.all
@pytest.mark.parametrize("kept", cases(["pairs", "changes"]))
def test_an_operator_that_is_gone_can_be_left_behind(lab: Lab, kept: str) -> None:
    """The others move up in Spark's numbering, so that it takes the query without it."""
    keys = {"pairs": ["carrier", "origin"], "changes": ["origin"]}
    with configured(lab.spark, UNCHECKED):
        (later, *_) = saved(lab, TWO)
        lab.feed(later)
        restored(lab, skip=keys.keys() - {kept})
        (batch,) = lab.run(counts(lab.source(TWO.schema), keys[kept], kept), "again")
    three = TWO.files()[:3]
    assert batch
    if kept == "pairs":
        pairs = [pair for file in three for pair in zip(*(file[key].to_pylist() for key in keys["pairs"]), strict=True)]
        assert {(row["carrier"], row["origin"]): row["n"] for row in batch}.items() <= Counter(pairs).items()
    else:  # it counted micro-batches of pairs, and now counts rows
        assert all(row["n"] > seen([later], "origin")[row["origin"]] for row in batch)
    assert len(list((lab.folder / "durable-again").glob("*/operator"))) == 1


def appended_if(frame: DataFrame, condition: str) -> DataFrame:
    """Count rows, and append to a list those for which something holds: the second operator is a processor."""
    counted = counts(frame, ["carrier", "seq"], "pairs").where(condition)
    counted = counted.withColumn("seq", counted["seq"].cast("long"))
    grouped = holdfast.stream(counted).groupBy("carrier")
    return grouped.transformWithState(Appending(), "carrier string, seen string", "update", "None", name="alerts")


def counted_if(frame: DataFrame, condition: str) -> DataFrame:
    counted = counts(frame, ["carrier", "origin"], "pairs").where(condition)
    return counts(counted, ["carrier"], "alerts")


def reminded_if(frame: DataFrame, condition: str) -> DataFrame:
    """Count rows, and wait for what comes after those for which something holds: the second operator has timeouts."""

    def remind(key: tuple[str], _chunks: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        state.update((1,))
        state.setTimeoutDuration(3_600_000)
        yield pd.DataFrame({"carrier": [key[0]]})

    grouped = holdfast.stream(counts(frame, ["carrier", "origin"], "pairs").where(condition)).groupBy("carrier")
    clock = "ProcessingTimeTimeout"
    return grouped.applyInPandasWithState(remind, "carrier string", "n long", "update", clock, name="alerts")


# With timeouts Spark would run micro-batches without rows for ever.
NO_MORE = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}
QUIET = {
    "vectorised": (counted_if, UNCHECKED),
    "processor": (appended_if, {**NEEDED, **UNCHECKED}),
    "timeouts": (reminded_if, {**NO_MORE, **UNCHECKED}),
}


@pytest.mark.all
@pytest.mark.parametrize("kind", cases(sorted(QUIET), quick=1))
def test_an_operator_without_rows_is_saved_as_empty(lab: Lab, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing tells its name: a restore asks for it, and then knows it from a misspelt one."""
    query, settings = QUIET[kind]
    schema = "carrier string, origin string, seq string"
    files = [
        file.cast(pa.schema([(n, pa.string()) for n in ("carrier", "origin", "seq")]))
        for file in (file.select(["carrier", "origin", "seq"]) for file in ONE.files()[:3])
    ]
    with configured(lab.spark, settings):
        lab.feed(files[0])
        lab.run(query(lab.source(schema), "n < 0"))
        with caplog.at_level(logging.WARNING):
            made = savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
        assert "it is saved as 'unnamed-0'" in caplog.text
        assert {of.name: (of.number, sum(of.rows.values()) > 0) for of in made.operators} == {
            "unnamed-0": (0, False),
            "pairs": (1, True),
        }
        assert savepoints.verify(lab.folder / "savepoints", "one") == []
        with pytest.raises(InvalidArgumentError, match="--rename unnamed-0="):
            restored(lab)
        assert not list(lab.folder.glob("again*"))
        restored(lab, rename={"unnamed-0": "alerts"}, shards=3)
        lab.feed(files[1])
        lab.run(query(lab.source(schema), "n < 0"), "again")  # it is quiet still
        lab.feed(files[2])
        (batch,) = lab.run(query(lab.source(schema), "n > 0"), "again")
        assert {row["carrier"] for row in batch} == set(files[2]["carrier"].to_pylist())
        assert sum(n_of(lab, "again", "pairs")) == sum(file.num_rows for file in files)
        restored(lab, "misspelt", rename={"unnamed-0": "alarms"})
        with pytest.raises(
            StreamingQueryException, match=r"without state for this operator.*operator=alerts restored=pairs"
        ):
            lab.run(query(lab.source(schema), "n > 0"), "misspelt")


@pytest.mark.all
def test_state_of_sparks_own_that_was_left_out_can_be_skipped(lab: Lab) -> None:
    """The way out of an operator of Spark's own: the new query does without it."""
    files = ONE.files()
    lab.feed(files[0])
    with configured(lab.spark, UNCHECKED):
        lab.run(totals(lab.source(ONE.schema).dropDuplicates(["carrier", "seq"])))
    where = lab.folder / "savepoints"
    savepoints.create(lab.spark, lab.folder / "query", where, "one", without=["dedupe"])
    with pytest.raises(InvalidArgumentError, match="skip them if the new query does not have them"):
        restored(lab)
    restored(lab, skip=["dedupe"])
    lab.feed(files[1])
    (batch,) = lab.run(totals(lab.source(ONE.schema)), "again")
    both = seen(files[:2])
    assert {row["carrier"]: row["n"] for row in batch} == {key: both[key] for key in seen(files[1:2])}


def test_what_cannot_be_is_said_before_anything_is_written(lab: Lab) -> None:
    saved(lab, ONE)
    for error, said, options in (
        (NotFoundError, "no operator of this name to skip.*operators=totals", {"skip": ["total"]}),
        (NotFoundError, "no operator of this name to reset", {"reset": ["total"]}),
        (NotFoundError, "no operator of this name to rename", {"rename": {"total": "counts"}}),
        (InvalidArgumentError, "no operator is left", {"skip": ["totals"]}),
        (InvalidArgumentError, "cannot be skipped and renamed", {"skip": ["totals"], "reset": ["totals"]}),
        (InvalidArgumentError, "lists of names", {"skip": "totals"}),
        (InvalidArgumentError, "must be a whole number from 1 to", {"shards": True}),
        (InvalidArgumentError, "must be a whole number from 1 to", {"partitions": 0}),
    ):
        with pytest.raises(error, match=said):
            restored(lab, **options)
    assert not list(lab.folder.glob("again*"))
    assert not list(lab.folder.glob("durable-again*"))


@pytest.mark.all
def test_a_name_that_another_query_has_is_said_with_its_remedy(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """A query is defined before Spark says which one it is: so its shards are those of the name."""
    (later, *_) = saved(lab, ONE)
    lab.feed(later)
    lab.configure({"state.dir": str(lab.folder / "durable")})
    with caplog.at_level(logging.WARNING):
        query_id = savepoints.restore(lab.spark, lab.folder / "savepoints", "one", lab.folder / "again", shards=3)
    assert "set spark.holdfast.shards=3" in caplog.text
    with pytest.raises(StreamingQueryException, match=r"set spark\.holdfast\.shards to 3"):
        lab.run(totals(lab.source(ONE.schema)), "again")
    lab.configure({"shards": "3"})
    (batch,) = lab.run(totals(lab.source(ONE.schema)), "again")
    three = seen(ONE.files()[:3])
    assert {row["carrier"]: row["n"] for row in batch} == {key: three[key] for key in seen([later])}
    assert (lab.folder / f"durable/totals@{query_id}/operator").exists()


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
