"""Joins beside Spark's own on the same random streams, micro-batch by micro-batch, across a restart."""

from __future__ import annotations

import datetime as dt
import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from holdfast.errors import InvalidArgumentError
from tests.spark.answers import Batches, Questions
from tests.spark.conftest import Lab
from tests.spark.operators.test_equal_to_spark import (
    NOON,
    SCHEMA,
    SEEDS,
    TYPES,
    asked,
    compare,
    feed,
    require_to_go_on,
    shown_by,
    source,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark

HOW = asked(["left"], "inner", "right", "full")
KEYS = ["user", "item"]


def keyed(frame: DataFrame) -> DataFrame:
    """Return a frame with keys that depend on the time: else Spark's join has those with nulls dropped before they
    count for the watermark.
    """
    return frame.withColumns({key: F.expr(f"if(unix_micros(at) != 0, {key}, NULL)") for key in KEYS})


def orders(lab: Lab, delay: str = "20 minutes") -> DataFrame:
    """Return half of the rows, each of which has a time."""
    return keyed(source(lab, delay)).where("at IS NOT NULL AND coalesce(b, true)").select("at", *KEYS, "i", "x", "s")


def payments(lab: Lab, delay: str = "10 minutes") -> DataFrame:
    """Return the other half, some of them twice."""
    rows = keyed(source(lab, delay)).where("at IS NOT NULL AND NOT b").withColumnRenamed("at", "paid")
    twice = F.explode(F.expr("if(l % 3 = 0, array(1, 2), array(1))"))
    return rows.select("item", "d", "raw", "paid", "user", twice.alias("copy")).drop("copy")


def joined(lab: Lab, how: str, within: str = "15 minutes") -> DataFrame:
    return holdfast.stream(orders(lab)).join(holdfast.stream(matched_by(lab, how)), on=KEYS, within=within, how=how)


def matched_by(lab: Lab, how: str) -> DataFrame:
    """Return the right side: in a full join Spark lets a key with a null in it equal the same one."""
    return payments(lab).dropna(subset=KEYS) if how == "full" else payments(lab)


def by_spark(left: DataFrame, right: DataFrame, how: str, within: str = "15 minutes") -> DataFrame:
    """Return Spark's own join, with the columns of one by names."""
    renamed = right.withColumnsRenamed({key: f"right_{key}" for key in KEYS})
    near = f"at >= paid - interval {within} AND at <= paid + interval {within}"
    equal = " AND ".join(f"{key} = right_{key}" for key in KEYS)
    shown = {"inner": "{0}", "left": "{0}", "right": "right_{0}", "full": "coalesce({0}, right_{0})"}[how]
    keys = [F.expr(shown.format(key)).alias(key) for key in KEYS]
    both = left.join(renamed, F.expr(f"{equal} AND {near}"), how)
    return both.select(*keys, "at", "i", "x", "s", "d", "raw", "paid")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", HOW)
def test_joins(lab: Lab, questions: Questions | None, how: str, seed: int) -> None:
    """Rows, columns and types are Spark's, and come when Spark's do: also those that nothing came near."""
    shown = compare(
        lab,
        seed,
        lambda: joined(lab, how),
        lambda: by_spark(orders(lab), matched_by(lab, how), how),
        "append",
        files=5,
        questions=questions,
    )
    assert sum(map(len, shown)) > 20
    rows = [row for batch in shown for row in batch]
    assert any(at is None for _, _, at, *_ in rows) == (how in ("right", "full"))
    assert any(paid is None for *_, paid in rows) == (how in ("left", "full"))


@pytest.mark.all
def test_a_row_without_time_comes_out_at_once(lab: Lab) -> None:
    """It can meet none, so that nothing is to be waited for; Spark's join never shows it."""
    feed(lab, random.Random(3), 2)
    timeless = source(lab).where("at IS NULL").select("at", *KEYS, "i")
    left = holdfast.stream(timeless).join(holdfast.stream(payments(lab)), on=KEYS, within="15 minutes", how="left")
    rows = [row for batch in lab.run(left, "ours", "append") for row in batch]
    assert len(rows) > 1
    assert all(row["paid"] is None for row in rows)
    names = {"user": "left_user", "item": "left_item"}
    near = "user = left_user AND item = left_item AND at BETWEEN paid - interval 1 hour AND paid + interval 1 hour"
    spark = timeless.withColumnsRenamed(names).join(payments(lab), F.expr(near), "left")
    assert not any(lab.run(spark, "spark", "append"))


@pytest.mark.all
def test_a_row_with_a_null_key_counts_for_the_watermark(lab: Lab) -> None:
    """Spark's join filters it out before, so that what is alone waits for others to be as late."""
    late, types = NOON + dt.timedelta(hours=2), pa.schema({"k": TYPES["s"], "at": TYPES["at"], "b": TYPES["b"]})
    for k, at, b in (
        (["a", "z"], [NOON] * 2, [True, False]),
        ([None] * 2, [late] * 2, [True, False]),
        (["b"], [late], [False]),
    ):
        lab.feed(pa.table({"k": k, "at": at, "b": b}, types))
    rows = lab.source("k string, at timestamp, b boolean")
    left = rows.where("b").select("k", "at").withWatermark("at", "5 minutes")
    right = rows.where("NOT b").selectExpr("k", "at AS paid").withWatermark("paid", "5 minutes")
    ours = holdfast.stream(left).join(holdfast.stream(right), on="k", within="10 minutes", how="right")
    near = "k = other AND at BETWEEN paid - interval 10 minutes AND paid + interval 10 minutes"
    spark = left.withColumnRenamed("k", "other").join(right, F.expr(near), "right")
    found = [lab.run(frame, query, "append") for frame, query in ((ours, "ours"), (spark, "spark"))]
    assert [[row["k"] for rows in batches for row in rows] for batches in found] == [["z"], []]


def test_an_as_of_join_finds_what_a_search_in_all_rows_finds(lab: Lab) -> None:
    """Over micro-batches and a restart: each row of the left side once, beside the latest row that is near."""
    chance = random.Random(5)

    def frame() -> DataFrame:
        df = source(lab, "12 hours")
        left = df.where("coalesce(b, true)").select("user", "at", "l")
        right = df.where("NOT b").select("user", "at", "i")
        return holdfast.stream(left).asof_join(holdfast.stream(right), on="user", by="at", tolerance="5 minutes")

    shown = []
    for files in (3, 2, 1):
        feed(lab, chance, files)
        if files == 1:  # far later than all others
            lab.feed(
                pq.read_table(lab.folder / "input" / "000.parquet").set_column(
                    2, "at", pa.array([NOON + dt.timedelta(days=9)] * 60, TYPES["at"])
                )
            )
        shown += [row for batch in lab.run(frame(), "query", "append") for row in batch]
    rows = pq.read_table(lab.folder / "input").to_pylist()
    rows = [row for row in rows if row["at"] is None or row["at"] < NOON + dt.timedelta(days=8)]
    left = [row for row in rows if row["b"] is not False]
    shown = [row for row in shown if row["at"] is None or row["at"] < NOON + dt.timedelta(days=8)]
    rates: dict[Any, list[Any]] = {}
    for row in rows:
        if row["b"] is False and row["at"] is not None and row["user"] is not None:
            rates.setdefault((row["user"], row["at"]), []).append(row["i"])
    assert sorted(repr((r["user"], r["at"], r["l"])) for r in shown) == sorted(
        repr((r["user"], r["at"], r["l"])) for r in left
    )
    found = 0
    for row in shown:
        user, at = row["user"], row["at"]
        near = [t for u, t in rates if u == user and at is not None and at - dt.timedelta(minutes=5) <= t <= at]
        # Of rows of one key and time the last to come counts, and which comes last is chance.
        assert row["i"] in (rates[user, max(near)] if near else [None])
        found += bool(near)
    assert found > 5


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"how": "cross"}, InvalidArgumentError, "how must be.*cross"),
        ({"within": "soon"}, InvalidArgumentError, "within must be a positive duration.*soon"),
        ({"on": "nope"}, AnalysisException, "nope"),
        ({"on": ["user", "at"]}, InvalidArgumentError, "cannot be a key"),
        ({"on": "s"}, AnalysisException, "s"),
        ({"name": "a/b"}, InvalidArgumentError, "cannot name"),
        ({"on": "user"}, InvalidArgumentError, "two columns with the same name.*item"),
    ],
)
def test_a_wrong_definition_says_so(lab: Lab, changed: dict[str, Any], error: type[Exception], text: str) -> None:
    """Nothing has run then; where Spark has an error for it, it is Spark's."""
    feed(lab, random.Random(1), 1)
    arguments = {"on": KEYS, "within": "15 minutes", **changed}
    with pytest.raises(error, match=text):
        holdfast.stream(orders(lab)).join(holdfast.stream(payments(lab)), **arguments)


def test_sides_that_do_not_fit_are_refused(lab: Lab) -> None:
    """Each error says what to do."""
    feed(lab, random.Random(1), 1)
    left = holdfast.stream(orders(lab))
    wrong: list[tuple[Any, str]] = [
        (payments(lab), "takes another stream"),
        (holdfast.stream(payments(lab).withColumn("item", F.col("item").cast("string"))), "same name and type"),
        (holdfast.stream(payments(lab).withColumn("paid", F.col("paid") + F.expr("interval 1 day"))), "withWatermark"),
        (holdfast.stream(lab.spark.read.schema(SCHEMA).parquet(str(lab.folder / "input"))), "must be a stream"),
    ]
    for other, text in wrong:
        with pytest.raises(InvalidArgumentError, match=text):
            left.join(other, on=KEYS, within="15 minutes")
    with pytest.raises(InvalidArgumentError, match="by must name the watermark column"):
        left.asof_join(holdfast.stream(payments(lab)), on=KEYS, by="at", tolerance="1 hour")


@pytest.mark.all
def test_state_is_read_from_outside(lab: Lab) -> None:
    """Under the columns' names; of a key the rows of both sides."""
    feed(lab, random.Random(4), 2)
    lab.run(joined(lab, "left"), "query", "append")
    left, right = (holdfast.read_state(lab.spark, lab.folder / "query", "join", table=t) for t in ("left", "right"))
    assert left.schema.names == [*KEYS, "at", "number", "i", "x", "s", "matched"]
    assert right.schema.names == ["user", "item", "paid", "number", "d", "raw"]
    rows = [row for row in left.to_pylist() if row["user"] == "ann" and row["item"] == 0]
    with holdfast.open_query(lab.folder / "query", str(lab.folder / "durable")) as query:
        found = query.get("join", {"user": "ann", "item": 0.0})
    assert sorted(found["j.left"].to_pylist(), key=repr) == sorted(rows, key=repr)
    assert len(rows) > 0


@pytest.mark.all
@pytest.mark.parametrize("how", ["inner", "left", "right", "full", "as of"])
def test_a_join_goes_on_from_a_savepoint(lab: Lab, how: str) -> None:
    """With other shards, on another backend, in another place: it shows what it would have shown."""

    def frame() -> DataFrame:
        if how != "as of":
            return joined(lab, how)
        right = payments(lab).withColumnRenamed("paid", "at")
        return holdfast.stream(orders(lab)).asof_join(holdfast.stream(right), on=KEYS, by="at", tolerance="15 minutes")

    def shown(query: str) -> Batches:
        # Of rows of the right side with one key and time the last to come counts, and which comes last is chance.
        return shown_by(lab, frame().drop("d", "raw") if how == "as of" else frame(), query, "append")

    require_to_go_on(lab, shown, random.Random(8), (3, 5))
