"""Operators behind operators, ours and Spark's, beside Spark's own in the same order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from holdfast import savepoints
from holdfast.errors import InvalidArgumentError
from tests.spark.answers import Batches
from tests.spark.conftest import Lab
from tests.spark.operators.test_equal_to_spark import compare, feed, require_to_go_on, shown_by, source
from tests.spark.operators.test_joins import by_spark, joined, orders, payments
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.spark.processors.test_chaining import OUTPUT as NUMBERED
from tests.spark.processors.test_chaining import Numbering
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def state_store(lab: Lab) -> Iterator[None]:
    """Give Spark the state store with which a watermark is handed on."""
    ((name, provider),) = NEEDED.items()
    before = str(lab.spark.conf.get(name))
    lab.spark.conf.set(name, provider)
    yield
    lab.spark.conf.set(name, before)


def windows_of_joined(lab: Lab) -> DataFrame:
    pairs = joined(lab, "left").drop("paid")
    return holdfast.stream(pairs).groupBy("user").window("at", "20 minutes").agg(n=holdfast.count("d"))


def windows_of_joined_by_spark(lab: Lab) -> DataFrame:
    pairs = by_spark(orders(lab), payments(lab), "left").drop("paid")
    return pairs.groupBy("user", F.window("at", "20 minutes")).agg(F.count("d").alias("n"))


def sessions_of_distinct(lab: Lab) -> DataFrame:
    distinct = holdfast.stream(source(lab)).dropDuplicates(["user", "i", "at"])
    return holdfast.stream(distinct).groupBy("user").session("at", "5 minutes").agg(n=holdfast.count())


def sessions_of_distinct_by_spark(lab: Lab) -> DataFrame:
    distinct = source(lab).dropDuplicates(["user", "i", "at"])
    return distinct.groupBy("user", F.session_window("at", "5 minutes")).agg(F.count("*").alias("n"))


def hours_of_sessions(lab: Lab) -> DataFrame:
    sessions = holdfast.stream(source(lab)).groupBy("user").session("at", "5 minutes").agg(n=holdfast.count())
    hours = holdfast.stream(sessions).groupBy("user").window("session_window", "1 hour")
    return hours.agg(n=holdfast.count(), longest=holdfast.max("n"))


def hours_of_sessions_by_spark(lab: Lab) -> DataFrame:
    sessions = source(lab).groupBy("user", F.session_window("at", "5 minutes")).agg(F.count("*").alias("n"))
    hours = sessions.groupBy("user", F.window("session_window", "1 hour"))
    return hours.agg(F.count("*").alias("n"), F.max("n").alias("longest"))


def sparks_windows_of_windows(lab: Lab) -> DataFrame:
    quarters = holdfast.stream(source(lab)).groupBy("user").window("at", "15 minutes").agg(n=holdfast.count())
    return quarters.groupBy("user", F.window("window", "1 hour")).agg(F.sum("n").alias("n"))


def windows_of_windows_by_spark(lab: Lab) -> DataFrame:
    quarters = source(lab).groupBy("user", F.window("at", "15 minutes")).agg(F.count("*").alias("n"))
    return quarters.groupBy("user", F.window("window", "1 hour")).agg(F.sum("n").alias("n"))


def all_of_them(lab: Lab) -> DataFrame:
    distinct = holdfast.stream(orders(lab)).dropDuplicates(["user", "item", "at"], name="distinct")
    pairs = holdfast.stream(distinct.drop("i", "x", "s")).join(
        holdfast.stream(payments(lab).select("user", "item", "paid", "d")), on=["user", "item"], within="15 minutes"
    )
    sessions = holdfast.stream(pairs.drop("paid")).groupBy("user").session("at", "5 minutes").agg(n=holdfast.count())
    return holdfast.stream(sessions).groupBy("user").window("session_window", "1 hour").agg(n=holdfast.sum("n"))


def all_of_them_by_spark(lab: Lab) -> DataFrame:
    distinct = orders(lab).dropDuplicates(["user", "item", "at"]).select("user", "item", "at")
    right = payments(lab).selectExpr("user AS u", "item AS t", "paid", "d")
    near = "at >= paid - interval 15 minutes AND at <= paid + interval 15 minutes"
    pairs = distinct.join(right, F.expr(f"user = u AND item = t AND {near}")).drop("paid")
    sessions = pairs.groupBy("user", F.session_window("at", "5 minutes")).agg(F.count("*").alias("n"))
    return sessions.groupBy("user", F.window("session_window", "1 hour")).agg(F.sum("n").alias("n"))


#: Ours, and the same by Spark.
CHAINS: dict[str, tuple[Callable[[Lab], DataFrame], Callable[[Lab], DataFrame]]] = {
    "window behind join": (windows_of_joined, windows_of_joined_by_spark),
    "session behind dedup": (sessions_of_distinct, sessions_of_distinct_by_spark),
    "window behind session": (hours_of_sessions, hours_of_sessions_by_spark),
    "Spark's window behind window": (sparks_windows_of_windows, windows_of_windows_by_spark),
    "window behind session behind join behind dedup": (all_of_them, all_of_them_by_spark),
}


@pytest.mark.all
@pytest.mark.live
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("chain", CHAINS)
def test_what_follows_sees_the_watermark(lab: Lab, chain: str, seed: int) -> None:
    """It shows what Spark's shows when Spark's does, and takes rows that a join shows late, across a restart."""
    ours, spark = CHAINS[chain]
    shown = compare(lab, seed, lambda: ours(lab), lambda: spark(lab), "append", files=6)
    assert sum(map(len, shown)) > 5


@pytest.mark.all
def test_the_top_windows_follow_windows(lab: Lab) -> None:
    """Each micro-batch ranks the windows that are over by then, as a search in all of Spark's finds them."""

    def ours() -> DataFrame:
        windows = holdfast.stream(source(lab)).groupBy("user").window("at", "20 minutes").agg(n=holdfast.count())
        started = windows.select("user", "n", F.col("window.start").alias("start"))
        return holdfast.stream(started).groupBy("user").top(2, by=["n", "start"])

    def spark() -> DataFrame:
        windows = source(lab).groupBy("user", F.window("at", "20 minutes")).agg(F.count("*").alias("n"))
        return windows.select("user", "n", F.col("window.start").alias("start"))

    chance = random.Random(11)
    lists: dict[Any, list[Any]] = {}
    for _ in range(2):
        feed(lab, chance, 8)
        found = [rows for rows in lab.run(ours(), "ours", "update") if rows]
        expected = []
        for rows in filter(None, lab.run(spark(), "spark", "append")):
            before = dict(lists)
            for row in rows:
                ranked = [*lists.get(row["user"], []), (row["n"], row["start"])]
                lists[row["user"]] = sorted(ranked, reverse=True)[:2]
            changed = [user for user in lists if lists[user] != before.get(user)]
            expected += [[(user, place, *row) for user in changed for place, row in enumerate(lists[user], 1)]]
        shown = [[(row["user"], row["place"], row["n"], row["start"]) for row in rows] for rows in found]
        assert [sorted(rows, key=repr) for rows in shown] == [sorted(rows, key=repr) for rows in expected if rows]
        assert len(shown) > 2


@pytest.mark.parametrize("chain", cases([chain for chain in CHAINS if not chain.startswith("Spark's")]))
def test_all_operators_go_on_from_a_savepoint(lab: Lab, chain: str) -> None:
    """With other shards, on another backend: the query shows what it would have shown."""

    def shown(query: str) -> Batches:
        return shown_by(lab, CHAINS[chain][0](lab), query, "append")

    require_to_go_on(lab, shown, random.Random(7), (3, 5))


@pytest.mark.all
def test_operators_that_nothing_has_reached_go_on_from_a_savepoint(lab: Lab) -> None:
    """As in a chain's first micro-batches: nothing tells their names, so that the restore gives them."""
    chance = random.Random(9)

    def shown(query: str) -> Batches:
        with configured(lab.spark, {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}):
            return shown_by(lab, all_of_them(lab), query, "append")

    feed(lab, chance, 1)
    assert not shown("query")
    made = savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    from_the_end = sorted(made.operators, key=lambda of: of.number)
    named = zip(from_the_end, ("window", "session", "join", "distinct"), strict=True)
    rename = {of.name: name for of, name in named if of.is_unnamed}
    assert "window" in rename.values()
    feed(lab, chance, 5)
    expected = shown("query")
    lab.configure({"state.dir": str(lab.folder / "again-state")})
    savepoints.restore(lab.spark, lab.folder / "savepoints", "one", lab.folder / "again", shards=3, rename=rename)
    assert shown("again") == expected
    assert expected


def test_what_cannot_follow_says_so(lab: Lab) -> None:
    """Spark's own operators would drop what a join shows late, or fail; and two times would be two watermarks."""
    feed(lab, random.Random(1), 1)
    pairs = joined(lab, "inner")
    with pytest.raises(AnalysisException, match="watermark"):
        lab.run(pairs.groupBy(F.window("at", "1 hour")).count(), mode="append")
    with pytest.raises(AnalysisException, match="event time columns"):
        holdfast.stream(pairs).dropDuplicates(["user"])
    by_user = holdfast.stream(pairs.drop("paid")).groupBy("user")
    for api, method in (("row", by_user.transformWithState), ("pandas", by_user.transformWithStateInPandas)):
        with pytest.raises(InvalidArgumentError, match="eventTimeColumnName cannot follow a join"):
            method(Numbering(api), NUMBERED, "append", "EventTime", eventTimeColumnName="at")
    lab.spark.conf.unset(next(iter(NEEDED)))
    with pytest.raises(InvalidArgumentError, match="RocksDB state store"):
        holdfast.stream(joined(lab, "inner").drop("paid")).groupBy("user").window("at", "1 hour").agg(
            n=holdfast.count()
        )


def test_a_restart_may_change_the_output_mode(lab: Lab) -> None:
    """Spark notes the output mode of what hosts an operator, and lets no restart change that."""
    chance = random.Random(8)
    for mode in ("update", "append"):
        feed(lab, chance, 3)
        windows = holdfast.stream(source(lab)).groupBy("user").window("at", "20 minutes")
        assert any(lab.run(windows.agg(n=holdfast.count(), outputMode=mode), mode=mode))


@pytest.mark.parametrize("began_with_rocksdb", cases([False, True], quick=1))
def test_another_state_store_than_a_query_began_with_says_so(lab: Lab, began_with_rocksdb: bool) -> None:
    """The session's decides which of Spark's operators hosts ours; the query's own cannot change."""
    ((name, provider),) = NEEDED.items()

    def run(with_rocksdb: bool) -> None:
        feed(lab, random.Random(8), 1)
        lab.spark.conf.set(name, provider) if with_rocksdb else lab.spark.conf.unset(name)
        windows = holdfast.stream(source(lab)).groupBy("user").window("at", "20 minutes")
        lab.run(windows.agg(n=holdfast.count()), mode="append")

    run(began_with_rocksdb)
    with pytest.raises(StreamingQueryException) as raised:
        run(not began_with_rocksdb)
    assert name in holdfast.explain(raised.value)
