"""Savepoints made of DataFrames: initial state, edited copies, and the state of Spark's own operators."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from holdfast import savepoints
from holdfast.errors import ConflictError, InvalidArgumentError, NotFoundError, SchemaMismatchError
from holdfast.examples.flights.sessions import CHAIN, CHAINS, chains, follow
from holdfast.examples.stateful import sessions
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.spark.savepoints.queries import (
    CASES,
    Appending,
    Case,
    Counting,
    Everything,
    restored,
    rows,
    run,
    saved,
    state,
)
from tests.tiers import cases

pytestmark = pytest.mark.spark

TOTALS, CHAINS_CASE, _, SESSIONS, *_ = CASES
APPENDED = next(case for case in CASES if case.table == "seen")


def written(lab: Lab, tables: Any, **options: Any) -> savepoints.Savepoint:
    given = {"operator": "totals", "keys": "carrier", "shards": 3} | options
    return savepoints.write(tables, lab.folder / "savepoints", "one", **given)


def carriers(lab: Lab, counts: dict[str | None, int]) -> DataFrame:
    return lab.spark.createDataFrame(list(counts.items()), "carrier string, n long")


def contents(lab: Lab, operator: str, table: str, name: str = "one") -> list[dict[str, Any]]:
    found = savepoints.load(lab.spark, lab.folder / "savepoints", name, operator, table)
    return sorted(found.drop("shard").toArrow().to_pylist(), key=repr)


def test_a_new_query_begins_with_what_was_written(lab: Lab) -> None:
    """Its first micro-batch reads its source from the beginning, and sees the state."""
    file = TOTALS.files()[0]
    present = {name: file["carrier"].to_pylist().count(name) for name in set(file["carrier"].to_pylist())}
    initial = dict.fromkeys(present, 1000) | {None: 7, "quiet": 3}
    made = written(lab, carriers(lab, initial), comment="by hand")
    assert (made.operators[0].rows, made.query.query_id) == ({"state": len(initial)}, "")
    assert savepoints.verify(lab.folder / "savepoints", "one") == []
    restored(lab)
    lab.feed(file)
    (batch,) = lab.run(TOTALS.query(lab.source(TOTALS.schema)), "again", TOTALS.mode)
    assert {row["carrier"]: row["n"] for row in batch} == {key: 1000 + n for key, n in present.items()}
    left = holdfast.read_state(lab.spark, lab.folder / "again", "totals").to_pylist()
    assert {row["carrier"]: row["n"] for row in left if row["carrier"] in (None, "quiet")} == {None: 7, "quiet": 3}


@pytest.mark.all
def test_written_timers_fire(lab: Lab) -> None:
    """A chain of flights that was written ends when its timer says, though its aircraft never flies."""
    file = CHAINS_CASE.files()[0]
    first_ms = int(min(file["departure"].to_pylist()).timestamp() * 1000)
    chain = [("N0", 2, first_ms - 9, first_ms - 5, "LAX JFK")]
    tables = {
        "state": lab.spark.createDataFrame(chain, f"tailnum string, {CHAIN}"),
        "timers": lab.spark.createDataFrame([("N0", first_ms)], "tailnum string, due_ms long"),
    }
    made = written(lab, tables, operator="chains", keys=["tailnum"], timeMode="EventTime")
    assert made.operators[0].rows == {"state": 1, "timers": 1, "timers_by_due": 1}
    restored(lab)
    lab.feed(file)
    ended = [row for batch in lab.run(chains(lab.source(CHAINS_CASE.schema)), "again", "append") for row in batch]
    assert [row["airports"] for row in ended if row["tailnum"] == "N0"] == ["LAX JFK"]


def test_what_cannot_be_state_is_refused(lab: Lab) -> None:
    """The error names the key; no savepoint is left."""
    twice = carriers(lab, {"AA": 1}).union(carriers(lab, {"AA": 2}))
    with pytest.raises(InvalidArgumentError, match=r"a key occurs twice.*carrier=.*AA"):
        written(lab, twice)
    timer = lab.spark.createDataFrame([("AA", None)], "carrier string, due_ms long")
    with pytest.raises(InvalidArgumentError, match="a timer has no due time"):
        written(lab, {"state": carriers(lab, {"AA": 1}), "timers": timer}, timeMode="EventTime")
    with pytest.raises(InvalidArgumentError, match="timers need a clock"):
        written(lab, {"state": carriers(lab, {"AA": 1}), "timers": timer})
    with pytest.raises(InvalidArgumentError, match="a column besides its keys"):
        written(lab, carriers(lab, {"AA": 1}).select("carrier"))
    with pytest.raises(InvalidArgumentError, match="same keys"):
        written(lab, {"one": carriers(lab, {"AA": 1}), "two": lab.spark.range(1).selectExpr("id carrier", "id n")})
    with pytest.raises(InvalidArgumentError, match="bigint column expires_ms"):
        written(lab, carriers(lab, {"AA": 1}), expiring=["state"])
    for wrong, problem in [
        ({"sources": 0}, "or names of letters"),
        ({"sources": True}, "or names of letters"),
        ({"sources": ["../x"]}, "or names of letters"),
        ({"shards": 0}, "shards must be a whole number"),
        ({"shards": "3"}, "shards must be a whole number"),
        ({"comment": 7}, "comment must be a string"),
    ]:
        with pytest.raises(InvalidArgumentError, match=problem):
            written(lab, carriers(lab, {"AA": 1}), **wrong)
    for name in ("l.x", "timers_by_due", "../x", "state.expiring"):
        with pytest.raises(InvalidArgumentError, match="cannot name a state table"):
            written(lab, {name: carriers(lab, {"AA": 1})})
    with pytest.raises(PySparkException, match="CAST_INVALID_INPUT"):  # the DataFrame's own failure stays Spark's
        written(lab, lab.spark.range(1).selectExpr("'AA' AS carrier", "CAST(concat('x', id) AS long) AS n"))
    assert [one.savepoint for one in savepoints.listed(lab.folder / "savepoints")] in ([], [None])
    with pytest.raises(NotFoundError):
        savepoints.read(lab.folder / "savepoints", "one")
    written(lab, carriers(lab, {"AA": 1}))
    with pytest.raises(ConflictError, match="a savepoint of this name exists"):
        written(lab, carriers(lab, {"AA": 1}))


@pytest.mark.all
def test_every_type_of_state_can_be_written_and_read(lab: Lab) -> None:
    """Nested times too, whatever the session's time zone."""
    columns = """'k' || id AS a, CAST(id AS decimal(9, 2)) AS b, id * 1.5 AS n, timestamp_millis(id * 86400000) AS t,
        timestamp_ntz '2026-11-23 01:02:03' AS local, date '2026-11-23' AS d, CAST('x' AS binary) AS raw,
        array(named_struct('at', timestamp_millis(id), 'n', id)) AS list, map('m', timestamp_millis(id)) AS entries,
        CAST(NULL AS int) AS none, float('nan') AS nan"""
    with configured(lab.spark, {"spark.sql.session.timeZone": "America/New_York"}):
        frame = lab.spark.range(20).selectExpr(f"inline(array(struct({columns})))")
        written(lab, frame, keys=["a", "b", "t"])
        found = savepoints.load(lab.spark, lab.folder / "savepoints", "one").drop("shard")
        assert sorted(map(repr, found.select(*frame.columns).collect())) == sorted(map(repr, frame.collect()))


@pytest.mark.all
def test_columns_called_as_ours_are_edited(lab: Lab) -> None:
    """Beside a column ``Shard`` that of the shard has another name, and every column can be named in Spark."""
    written(lab, carriers(lab, {"AA": 1, "BB": 2}).withColumnRenamed("n", "Shard"))
    before = savepoints.load(lab.spark, lab.folder / "savepoints", "one")
    assert before.columns == ["carrier", "Shard", "_shard"]
    after = before.withColumn("Shard", F.col("Shard") + 10)
    savepoints.edit(after, lab.folder / "savepoints", "one", "edited")
    edited = savepoints.load(lab.spark, lab.folder / "savepoints", "edited")
    assert sorted(row[:2] for row in edited.collect()) == [("AA", 11), ("BB", 12)]


@pytest.mark.all
def test_one_key_is_edited(lab: Lab) -> None:
    """Read, change, write, restore: the query goes on from the same positions, and nothing else has changed."""
    later = saved(lab, TOTALS)
    key = later[0]["carrier"].to_pylist()[0]
    before = savepoints.load(lab.spark, lab.folder / "savepoints", "one")
    after = before.withColumn("n", F.when(F.col("carrier") == key, F.col("n") + 100).otherwise(F.col("n")))
    savepoints.edit(after, lab.folder / "savepoints", "one", "edited", comment="one more")
    facts, (table,) = savepoints.diff(lab.folder / "savepoints", "one", "edited")
    assert (facts, table.changed, table.added, table.removed) == ([], 1, 0, 0)
    savepoints.delete(lab.folder / "savepoints", "one")
    lab.configure({"state.dir": str(lab.folder / "durable-again")})
    savepoints.restore(lab.spark, lab.folder / "savepoints", "edited", lab.folder / "again")
    lab.feed(later[0])
    (batch,) = run(lab, TOTALS, "again", "durable-again")
    (original,) = run(lab, TOTALS)
    assert len(set(batch) - set(original)) == 1


@pytest.mark.all
def test_key_columns_that_differ_only_in_case_are_told_apart(lab: Lab) -> None:
    """By Spark as it is by default, which could not name either of two columns ``a`` and ``A``."""
    with configured(lab.spark, {"spark.sql.caseSensitive": "true"}):
        frame = lab.spark.createDataFrame([("x", "y", 5), ("y", "x", 6)], "a string, A string, n long")
        written(lab, frame, keys=["a", "A"])
    found = savepoints.load(lab.spark, lab.folder / "savepoints", "one")
    assert found.columns == ["a", "key.A", "n", "shard"]
    assert [tuple(row) for row in found.where("a = 'x'").select("`key.A`", "n").collect()] == [("y", 5)]
    key = savepoints.load(lab.spark, lab.folder / "savepoints", "one", key={"a": "y", "A": "x"})
    assert [row["n"] for row in key.collect()] == [6]
    savepoints.edit(found.where("n = 5"), lab.folder / "savepoints", "one", "edited")
    assert [row["n"] for row in contents(lab, "totals", "state", "edited")] == [5]


@pytest.mark.all
def test_what_does_not_fit_the_base_is_refused(lab: Lab) -> None:
    saved(lab, TOTALS)
    target = lab.folder / "savepoints"
    stored = savepoints.load(lab.spark, target, "one")
    for frame, problem in [
        (stored.drop("n"), "differ from those of the stored table"),
        (stored.withColumn("m", F.lit(1)), "differ from those of the stored table"),
        (stored.withColumn("carrier", F.lit(1)), r"different types than the stored ones.*carrier"),
    ]:
        with pytest.raises(InvalidArgumentError, match=problem):
            savepoints.edit(frame, target, "one", "edited")
    with pytest.raises(SchemaMismatchError, match="column 'n'"):
        savepoints.edit(stored.withColumn("n", F.lit("many")), target, "one", "edited")
    with pytest.raises(NotFoundError, match=r"no such table.*tables=state"):
        savepoints.edit({"stat": stored}, target, "one", "edited")
    with pytest.raises(NotFoundError, match="no such operator"):
        savepoints.edit(stored, target, "one", "edited", "totls")


@pytest.mark.all
def test_lists_and_timers_of_a_processor_are_edited(lab: Lab) -> None:
    """What is removed of a user is gone with its timers; all others go on as they were."""
    with configured(lab.spark, NEEDED):
        later = saved(lab, SESSIONS)
        target = lab.folder / "savepoints"
        opened = savepoints.load(lab.spark, target, "one", table="open")
        timers = savepoints.load(lab.spark, target, "one", table="timers")
        cut = opened.where("user != 'bob'"), timers.where("user != 'bob'")
        savepoints.edit({"open": cut[0], "timers": cut[1]}, target, "one", "edited")
        lab.configure({"state.dir": str(lab.folder / "durable-again")})
        savepoints.restore(lab.spark, target, "edited", lab.folder / "again", shards=3)
        for file in later:
            lab.feed(file)
        original = run(lab, SESSIONS)
        edited = run(lab, SESSIONS, "again", "durable-again")
    others = [[[row for row in batch if "'bob'" not in row] for batch in batches] for batches in (original, edited)]
    assert others[0] == others[1]
    (before, after) = ([row for batch in batches for row in batch if "'bob'" in row] for batches in (original, edited))
    assert before != after


@dataclass(frozen=True)
class SparkCase:
    """A query on Spark's operator, and the same on holdfast."""

    case: Case
    on_spark: Callable[[DataFrame], DataFrame]
    timeout_conf: Any = None


def chains_on_spark(flights: DataFrame) -> DataFrame:
    timed = flights.where("tailnum is not null").withColumn("departure_ms", F.unix_millis("departure"))
    legs = timed.select("seq", "tailnum", "dest", "departure", "departure_ms").withWatermark("departure", "1 hour")
    return legs.groupBy("tailnum").applyInPandasWithState(follow, CHAINS, CHAIN, "append", "EventTimeTimeout")


def sessions_on_spark(clicks: DataFrame) -> DataFrame:
    timed = clicks.withWatermark("at", "10 minutes").withColumn("at_ms", F.unix_millis("at"))
    return timed.groupBy("user").transformWithState(sessions.Sessions(), sessions.SESSIONS, "append", "EventTime")


def appended_on_spark(frame: DataFrame) -> DataFrame:
    return frame.groupBy("carrier").transformWithState(Appending(), "carrier string, seen string", "update", "None")


SPARK_CASES = [
    SparkCase(CHAINS_CASE, chains_on_spark, "EventTimeTimeout"),
    SparkCase(SESSIONS, sessions_on_spark),
    SparkCase(APPENDED, appended_on_spark),
]


@pytest.mark.parametrize(
    "of_spark",
    [
        pytest.param(one, id=str(one.case), marks=pytest.mark.since("4.1") if one.timeout_conf is None else ())
        for one in cases(SPARK_CASES, quick=1)
    ],
)
def test_a_query_of_sparks_goes_on_with_holdfast(lab: Lab, of_spark: SparkCase) -> None:
    """From the same positions, with state, timers and watermark: output as Spark's operator goes on itself."""
    case, target = of_spark.case, lab.folder / "savepoints"
    files = case.files()
    with configured(lab.spark, dict(case.settings)):
        for file in files[:2]:
            lab.feed(file)
        lab.run(of_spark.on_spark(lab.source(case.schema)), "sparks", case.mode)
        made = savepoints.from_spark(
            lab.spark, lab.folder / "sparks", target, "one", case.operator, timeoutConf=of_spark.timeout_conf, shards=3
        )
        assert savepoints.verify(target, "one") == []
        assert made.operators[0].shards == 3
        restored(lab)
        for file in files[2:]:
            lab.feed(file)
        original = lab.run(of_spark.on_spark(lab.source(case.schema)), "sparks", case.mode)
        assert run(lab, case, "again", "durable-again") == rows(original)
        run(lab, case, "whole", "durable-whole")
        assert state(lab, case, "again", "durable-again") == state(lab, case, "whole", "durable-whole")


EVERYTHING = "key string, seen string, timers string"


def once(lab: Lab, frame: DataFrame, query: str) -> list[dict[str, Any]]:
    """Run a query in processing time, which never comes to an end by itself, over what is there."""
    found: list[dict[str, Any]] = []
    writer = frame.writeStream.foreachBatch(lambda rows, _: found.extend(rows.toArrow().to_pylist()))
    running = writer.outputMode("update").option("checkpointLocation", str(lab.folder / query)).start()
    try:
        wait_for(lambda: any(one["numInputRows"] for one in running.recentProgress) or running.exception())
    finally:
        running.stop()
    return sorted(found, key=repr)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.all
@pytest.mark.since("4.1")
def test_all_that_a_processor_of_sparks_may_keep(lab: Lab) -> None:
    """Variables of each kind, their expiry and timers in processing time."""
    target = lab.folder / "savepoints"
    with configured(lab.spark, NEEDED):
        lab.feed([("a", 1), ("a", 2), ("b", 3)])
        grouped = lab.source().groupBy("key")
        once(lab, grouped.transformWithState(Everything(), EVERYTHING, "update", "ProcessingTime"), "sparks")
        savepoints.from_spark(lab.spark, lab.folder / "sparks", target, "one", "everything")
        (operator,) = savepoints.read(target, "one").operators
        of_keys = dict.fromkeys(("v.v", "v.vt", "v.vt.expiring", "timers", "timers_by_due"), 2)
        of_values = dict.fromkeys(("l.l", "l.lt", "l.lt.expiring", "m.m", "m.mt", "m.mt.expiring"), 3)
        assert operator.rows == of_keys | of_values
        assert [row["n"] for row in contents(lab, "everything", "v")] == [2, 3]
        expires = {row["expires_ms"] for row in contents(lab, "everything", "lt")}
        now_ms = datetime.now(UTC).timestamp() * 1000
        assert all(now_ms < ms < now_ms + 3_600_000 for ms in expires)
        restored(lab)
        lab.feed([("a", 5)])
        ours = holdfast.stream(lab.source()).groupBy("key")
        frame = ours.transformWithState(Everything(), EVERYTHING, "update", "ProcessingTime", name="everything")
        (row,) = once(lab, frame, "again")
    numbers, maps = [(1,), (2,), (5,)], [("u1",), ("u2",), ("u5",)]
    assert row["seen"] == repr([numbers, numbers, maps, (5,)])
    assert row["timers"] == repr([4_102_444_800_002, 4_102_444_800_005])


@pytest.mark.all
@pytest.mark.since("4.1")
def test_an_earlier_micro_batch_has_the_variables_of_then(lab: Lab) -> None:
    """Those that a later run of the processor has left out are not lost."""
    with configured(lab.spark, NEEDED):
        for batch, names in enumerate((["kept", "gone"], ["kept"])):
            lab.feed([("a", batch)])
            grouped = lab.source().groupBy("key")
            lab.run(grouped.transformWithState(Counting(names), "key string", "update", "None"), "sparks")
        made = savepoints.from_spark(
            lab.spark, lab.folder / "sparks", lab.folder / "savepoints", "one", "counting", batchId=0
        )
    assert made.operators[0].rows == {"v.kept": 1, "v.gone": 1}


@pytest.mark.all
def test_what_is_not_sparks_python_state_is_refused(lab: Lab) -> None:
    target = lab.folder / "savepoints"
    file = TOTALS.files()[0]
    lab.feed(file)
    run(lab, TOTALS)
    with pytest.raises(InvalidArgumentError, match="holdfast's already"):
        savepoints.from_spark(lab.spark, lab.folder / "query", target, "one", "totals")
    lab.run(lab.source(TOTALS.schema).groupBy("carrier").count(), "counts")
    with pytest.raises(InvalidArgumentError, match="name the columns and functions of the aggregation"):
        savepoints.from_spark(lab.spark, lab.folder / "counts", target, "one", "totals")
    with pytest.raises(InvalidArgumentError, match="not the checkpoint location of a query"):
        savepoints.from_spark(lab.spark, lab.folder / "nowhere", target, "one", "totals")
