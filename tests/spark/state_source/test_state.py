"""A query's state as a DataFrame: what `read_state` shows, of every micro-batch that the query can return to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import holdfast
from holdfast.errors import InvalidArgumentError, NotFoundError
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.savepoints.queries import CASES, Case, run
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark


def rows(table: pa.Table) -> list[str]:
    return sorted(map(repr, table.to_pylist()))


def shown(frame: DataFrame) -> list[str]:
    return rows(frame.drop("shard").toArrow())


@pytest.mark.parametrize("case", cases(CASES), ids=str)
def test_every_micro_batch_that_the_query_can_return_to(lab: Lab, case: Case) -> None:
    """State and timers, of every operator's kind, as `read_state` has them."""
    with configured(lab.spark, dict(case.settings)):
        for file in case.files()[:3]:
            lab.feed(file)
        batches = len(run(lab, case))
        where = (lab.spark, lab.folder / "query", case.operator)
        for table in (case.table, *(["timers"] if case.has_timers else [])):
            for batch in (0, batches - 1, None):
                expected = holdfast.read_state(*where, table=table, batchId=batch)
                assert shown(holdfast.state(*where, table=table, batchId=batch)) == rows(expected)


@pytest.mark.all
def test_the_state_after_a_micro_batch(lab: Lab) -> None:
    """Computed from the input, also for those before the last one."""
    case = CASES[0]
    for file in case.files()[:3]:
        lab.feed(file)
    run(lab, case)
    for batch in range(3):
        carriers = pa.concat_tables(case.files()[: batch + 1]).column("carrier").value_counts().to_pylist()
        found = holdfast.state(lab.spark, lab.folder / "query", "totals", batchId=batch)
        assert found.columns == ["carrier", "n", "shard"]
        assert {row["carrier"]: row["n"] for row in found.collect()} == {
            row["values"]: row["counts"] for row in carriers
        }
    chosen = holdfast.state(lab.spark, lab.folder / "query", "totals", columns=["n", "carrier"])
    assert chosen.columns == ["n", "carrier"]
    assert rows(chosen.select("carrier", "n").toArrow()) == shown(found)


@pytest.mark.all
def test_a_read_stays_while_the_query_runs_and_cleans_up(lab: Lab) -> None:
    """A DataFrame is of one micro-batch; one that Spark has purged is an error."""
    case = CASES[0]
    files = case.files()
    with configured(lab.spark, {"spark.sql.streaming.minBatchesToRetain": "2"}):
        lab.feed(files[0])
        frame = case.query(lab.source(case.schema))
        writer = frame.writeStream.format("noop").outputMode("update")
        query = writer.option("checkpointLocation", str(lab.folder / "query")).start()
        try:
            query.processAllAvailable()
            first = holdfast.state(lab.spark, lab.folder / "query", "totals")
            before = shown(first)
            for file in files[1:]:
                lab.feed(file)
                query.processAllAvailable()
                assert shown(first) == before
            for file in files:
                lab.feed(file)
            query.processAllAvailable()
            last = holdfast.state(lab.spark, lab.folder / "query", "totals")
        finally:
            query.stop()
        assert shown(last) == rows(holdfast.read_state(lab.spark, lab.folder / "query", "totals"))
        assert shown(last) != before
        with pytest.raises(NotFoundError, match="Spark has purged it"):
            holdfast.state(lab.spark, lab.folder / "query", "totals", batchId=0)


@pytest.mark.all
def test_an_operator_without_state(lab: Lab) -> None:
    """No key that is left, in either of the shards: no rows, with all columns."""

    def forget(batch: holdfast.ShardBatch) -> pa.Table:
        batch.state.put(n=batch.groups.count(), total=batch.groups.sum("v"))
        batch.state.delete()
        return batch.keys.append_column("n", batch.groups.count()).append_column("total", batch.groups.sum("v"))

    lab.feed([("a", 1), ("b", 2)])
    lab.run(lab.totals(func=forget))
    found = holdfast.state(lab.spark, lab.folder / "query", "totals")
    assert (found.columns, found.count()) == (["key", "n", "total", "shard"], 0)


@pytest.mark.all
def test_what_cannot_be_is_said(lab: Lab) -> None:
    lab.feed([("a", 1)])
    lab.run(lab.totals())

    def of(operator: str = "totals", **options: Any) -> DataFrame:
        return holdfast.state(lab.spark, lab.folder / "query", operator, **options)

    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (NotFoundError, "no pointers to state of such an operator.*did you mean 'totals'", {"operator": "total"}),
        (NotFoundError, "Spark has purged it", {"batchId": 7}),
        (InvalidArgumentError, "a number, 0 or more", {"batchId": -1}),
        (InvalidArgumentError, "need readChangeFeed", {"changeStartBatchId": 1}),
        (InvalidArgumentError, "needs changeStartBatchId", {"readChangeFeed": True}),
        (InvalidArgumentError, "instead of batchId", {"readChangeFeed": True, "changeStartBatchId": 0, "batchId": 0}),
        (
            InvalidArgumentError,
            "ends before it begins",
            {"readChangeFeed": True, "changeStartBatchId": 1, "changeEndBatchId": 0},
        ),
        (
            InvalidArgumentError,
            "changeEndBatchId is a number",
            {"readChangeFeed": True, "changeStartBatchId": 0, "changeEndBatchId": "1"},
        ),
        (InvalidArgumentError, "a list of names", {"columns": "key"}),
        (InvalidArgumentError, "a list of names", {"columns": []}),
        (InvalidArgumentError, "a list of numbers", {"shards": [-1]}),
        (InvalidArgumentError, "no such shard", {"shards": [99]}),
        (NotFoundError, "^no such table", {"table": "timers"}),
        (NotFoundError, "^no such column", {"columns": ["k"]}),
    ]
    for error, message, options in refused:
        with pytest.raises(error, match=message):
            of(**options)
    assert of(shards=[]).collect() == []
    with pytest.raises(InvalidArgumentError, match="not the checkpoint location of a query"):
        holdfast.state(lab.spark, lab.folder / "input", "totals")


def test_a_key_is_read_from_its_shard(lab: Lab) -> None:
    """The other shards' objects are gone, so whoever reads one of them fails."""
    lab.configure({"shards": "8", "commit.carriedBytes": "0"})
    lab.feed([(f"k{i}", i) for i in range(200)] + [(None, 7)])
    lab.run(lab.totals())

    def state(**options: Any) -> DataFrame:
        return holdfast.state(lab.spark, lab.folder / "query", "totals", **options)

    everything = state()
    (row,) = everything.where("key = 'k7'").collect()
    (nobody,) = everything.where("key is null").collect()
    stored = list((lab.folder / "durable/totals").glob("shard-*"))

    assert len(stored) == 8
    for shard in stored:
        if shard.name not in (f"shard-{row['shard']:04d}", f"shard-{nobody['shard']:04d}"):
            shard.rename(lab.folder / shard.name)
    assert state(key={"key": "k7"}).collect() == [row]
    assert state(key={"key": None}, columns=["total"]).collect() == [(7,)]
    assert state(key={"key": "nobody's"}, shards=[row["shard"]]).collect() == []
    assert row in (found := state(shards=[row["shard"]]).collect())
    assert {one["shard"] for one in found} == {row["shard"]}
    with pytest.raises(PySparkException, match="not in the state directory"):
        everything.collect()
    for key in ({"k": "k7"}, {"key": "k7", "n": 1}, {"key": 7}):
        with pytest.raises(InvalidArgumentError, match="key"):
            state(key=key)


def test_spark_finds_the_source_by_itself(lab: Lab) -> None:
    """In a session where nobody has registered it, in SQL too."""
    case = CASES[0]
    lab.feed(case.files()[0])
    run(lab, case)
    from holdfast import savepoints

    savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    session = lab.spark.newSession()
    path = str(lab.folder / "savepoints/one")
    found = session.read.format("holdfast").option("operator", "totals").load(path)
    expected = rows(holdfast.read_state(lab.spark, lab.folder / "query", "totals"))
    assert shown(found) == expected
    session.sql(f"CREATE TEMPORARY VIEW saved USING holdfast OPTIONS (path '{path}', columns 'carrier,n')")
    assert rows(session.table("saved").toArrow()) == expected
    holdfast.register(session)
    holdfast.register(session)
    assert shown(session.read.format("holdfast").load(path)) == expected
