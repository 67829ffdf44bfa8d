"""What operators in one line share with all others: batch DataFrames, savepoints, look-ups, errors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import AnalysisException, ParseException, StreamingQueryException
from pyspark.sql import Column, Window
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from holdfast.errors import HoldfastError, InvalidArgumentError
from tests.pages import block_with
from tests.spark.conftest import Lab
from tests.spark.operators.test_equal_to_spark import (
    SCHEMA,
    feed,
    made,
    require_to_go_on,
    shape,
    shown_by,
    source,
    sparks,
    unordered,
)
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark


def spread(column: str | Column) -> holdfast.Aggregate:
    """Return how far the largest value is from the smallest one, by functions of our own."""
    return holdfast.aggregate(
        column,
        "int",
        "low int, high int",
        init=lambda values: {"low": values, "high": values},
        merge=lambda groups, states: {"low": groups.min(states["low"]), "high": groups.max(states["high"])},
        finish=lambda states: pc.subtract(states["high"], states["low"]),
    )


#: By name: the operator on a stream, and Spark's own.
OPERATORS: dict[str, tuple[Callable[[DataFrame], DataFrame], Callable[[DataFrame], DataFrame]]] = {
    "agg": (
        lambda df: (
            holdfast.stream(df)
            .groupBy("user")
            .agg(
                spread=spread("i"),
                near=holdfast.approx_count_distinct("x"),
                first=holdfast.min_by(F.struct("s", "day"), "l"),
                last=holdfast.max_by("d", F.col("l") * 2),
                **made("n", "sum_i", "mean_d"),
            )
        ),
        lambda df: df.groupBy("user").agg(
            (F.max("i") - F.min("i")).alias("spread"),
            F.approx_count_distinct("x").alias("near"),
            F.min_by(F.struct("s", "day"), "l").alias("first"),
            F.max_by("d", F.col("l") * 2).alias("last"),
            *sparks("n", "sum_i", "mean_d"),
        ),
    ),
    "window": (
        lambda df: holdfast.stream(df).groupBy("user").window("at", "1 hour").agg(**made("n", "max_s")),
        lambda df: df.groupBy("user", F.window("at", "1 hour")).agg(*sparks("n", "max_s")),
    ),
    "windows alone": (
        lambda df: holdfast.stream(df).window("at", "1 hour", "30 minutes").agg(holdfast.count(), holdfast.sum("i")),
        lambda df: df.groupBy(F.window("at", "1 hour", "30 minutes")).agg(F.count("*"), F.sum("i")),
    ),
    "session": (
        lambda df: (
            holdfast.stream(df)
            .groupBy("user")
            .session("at", "5 minutes")
            .agg(
                list=holdfast.collect_list("i"),
                set=holdfast.collect_set("s"),
                all=holdfast.count_distinct("x"),
                near=holdfast.approx_count_distinct("x"),
                ranked=holdfast.percentile_approx("at", [0, 0.5, 0.99]),
            )
        ),
        lambda df: df.groupBy("user", F.session_window("at", "5 minutes")).agg(
            F.collect_list("i").alias("list"),
            F.collect_set("s").alias("set"),
            F.count_distinct("x").alias("all"),
            F.approx_count_distinct("x").alias("near"),
            F.percentile_approx("at", [0, 0.5, 0.99]).alias("ranked"),
        ),
    ),
    "dropDuplicates": (
        # Of many values, so that later micro-batches have new ones.
        lambda df: holdfast.stream(df).dropDuplicates(["user", "l"]).select("user", "l"),
        lambda df: df.dropDuplicates(["user", "l"]).select("user", "l"),
    ),
    "top": (
        lambda df: (
            holdfast.stream(df).groupBy("user").top(2, by=["x", "l"], ttl="1 hour").select("user", "place", "x", "l")
        ),
        lambda df: ranked(df, 2).select("user", "place", "x", "l"),
    ),
    "latest": (
        lambda df: holdfast.stream(df).groupBy("user").latest(by=["x", "l"], ttl="1 hour").select("user", "x", "l"),
        lambda df: ranked(df, 1).select("user", "x", "l"),
    ),
}


def ranked(df: DataFrame, places: int) -> DataFrame:
    """Return each user's first rows, as Spark's own ``row_number`` has them in a batch."""
    by_user = Window.partitionBy("user").orderBy(F.desc("x"), F.desc("l"))
    return df.withColumn("place", F.row_number().over(by_user)).where(F.col("place") <= places)


@pytest.mark.parametrize("name", cases(list(OPERATORS), quick=4))
def test_a_batch_data_frame_gives_what_spark_gives(lab: Lab, name: str) -> None:
    """Values, names and types; windows and sessions are over at once."""
    feed(lab, random.Random(9), 2)
    df = lab.spark.read.schema(SCHEMA).parquet(str(lab.folder / "input"))
    ours, spark = (of(df) for of in OPERATORS[name])
    assert shape(ours) == shape(spark)
    found, expected = (
        sorted((unordered(row.asDict(recursive=True)) for row in frame.collect()), key=repr) for frame in (ours, spark)
    )
    assert found == expected


HOURS, OVERLAPPING = ("1 hour",), ("50 minutes", "20 minutes", "7 minutes")


@pytest.mark.parametrize(
    ("mode", "durations"),
    cases([("append", OVERLAPPING), ("update", HOURS), ("append", HOURS), ("update", OVERLAPPING)], quick=2),
)
def test_windows_of_many_rows_each(lab: Lab, mode: str, durations: tuple[str, ...]) -> None:
    """Tasks combine rows before the shuffle, and late ones are still told from others."""
    columns, chance = ("n", "sum_x", "mean_d", "min_s", "sd_i", "var_pop"), random.Random(3)

    def ours() -> DataFrame:
        windows = holdfast.stream(source(lab)).groupBy("item").window("at", *durations)
        return windows.agg(**made(*columns), outputMode=mode)

    def spark() -> DataFrame:
        return source(lab).groupBy("item", F.window("at", *durations)).agg(*sparks(*columns))

    found, expected = [], []
    for _ in range(2):
        feed(lab, chance, 2, rows=5000)
        found += shown_by(lab, ours(), "ours", mode)
        expected += shown_by(lab, spark(), "spark", mode)
    assert found == expected
    assert sum(map(len, found)) > 20


def test_an_argument_is_computed_once_for_all_windows_of_a_row(lab: Lab) -> None:
    """Spark hands over each row once; holdfast tells its windows apart."""
    calls = lab.spark.sparkContext.accumulator(0)

    def counted(i: int) -> int:
        calls.add(1)
        return i

    feed(lab, random.Random(4), 1)
    df = lab.spark.read.schema(SCHEMA).parquet(str(lab.folder / "input")).where("at IS NOT NULL")
    windows = holdfast.stream(df).groupBy("user").window("at", "1 hour", "10 minutes")
    found = windows.agg(i=holdfast.sum(F.udf(counted, "int", useArrow=False)("i")), n=holdfast.count()).collect()
    assert calls.value == df.count()
    assert sum(row["n"] for row in found) == 6 * df.count()


@pytest.mark.all
def test_a_sum_fails_by_its_total(lab: Lab) -> None:
    """Whatever the order of rows; Spark's fails where a running total overflows."""

    def ours() -> DataFrame:
        return holdfast.stream(lab.source()).groupBy("key").agg(n=holdfast.sum("v"))

    most = 2**63 - 1
    lab.feed([("a", most), ("a", 1), ("a", -1)])
    assert lab.run(ours(), "ours") == [[{"key": "a", "n": most}]]
    with pytest.raises(StreamingQueryException, match="ARITHMETIC_OVERFLOW"):
        lab.run(lab.source().groupBy("key").agg(F.sum("v")), "spark")
    lab.feed([("a", 1)])
    with pytest.raises(StreamingQueryException, match="a sum overflows its type"):
        lab.run(ours(), "ours")


@pytest.mark.parametrize(("rsd", "registers"), [(0.05, 512), (0.02, 4096)])
def test_estimates_of_many_values(lab: Lab, rsd: float, registers: int) -> None:
    """They are Spark's; those for which it takes a bias from a table are near."""
    sizes = [1, 10, 300, 400, 401, 1000, 1200, 1500, 1900, 2400, 2700, 5000, 9000, 12_000, 18_000, 24_000]
    rows = lab.spark.createDataFrame([(n,) for n in sizes], "n int")
    rows = rows.select("n", F.explode(F.sequence(F.lit(1), "n")).alias("v")).select("n", F.col("v").cast("string"))
    found = holdfast.stream(rows).groupBy("n").agg(n_v=holdfast.approx_count_distinct("v", rsd))
    both = found.join(rows.groupBy("n").agg(F.approx_count_distinct("v", rsd).alias("sparks")), "n").collect()
    assert len(both) == len(sizes)
    for n, near, expected in both:
        is_in_table = 2.3 * registers < n < 5.7 * registers
        assert near == pytest.approx(expected, rel=0.005) if is_in_table else near == expected


@pytest.mark.parametrize(
    "name", cases(["top", "window", "session", "dropDuplicates", "agg", "latest", "windows alone"])
)
def test_a_query_goes_on_from_a_savepoint(lab: Lab, name: str) -> None:
    """With other shards, on another backend, in another place: it shows what it would have shown."""
    mode = "update" if name in ("agg", "top", "latest") else "append"

    def frame() -> DataFrame:
        return OPERATORS[name][0](source(lab))

    def shown(query: str) -> list[list[Any]]:
        return [sorted(map(unordered, rows), key=repr) for rows in lab.run(frame(), query, mode) if rows]

    require_to_go_on(lab, shown, random.Random(4), (2, 2))


def test_state_is_read_from_outside(lab: Lab) -> None:
    """Under the columns' names, by key as well: also of sessions, of which a key has several."""
    feed(lab, random.Random(4), 1)
    lab.run(OPERATORS["session"][0](source(lab)), "sessions", "append")
    lab.run(OPERATORS["window"][0](source(lab)), "windows", "append")
    windows = holdfast.read_state(lab.spark, lab.folder / "windows", "window").to_pylist()
    assert {*windows[0]} == {"user", "window_start", "n", "max_s"}
    all_open = holdfast.read_state(lab.spark, lab.folder / "sessions", "session").to_pylist()
    kept = {"list", "set", "all.values", "near.registers", "ranked.ranked"}
    assert {*all_open[0]} == {"user", "session_start", "session_end", *kept}
    with holdfast.open_query(lab.folder / "sessions", str(lab.folder / "durable")) as query:
        for user in {row["user"] for row in all_open}:
            found = query.get("session", {"user": user}).popitem()[1].to_pylist()
            assert sorted(found, key=repr) == sorted((row for row in all_open if row["user"] == user), key=repr)


def test_rows_with_nested_columns_are_kept(lab: Lab) -> None:
    """Whatever Spark exchanges with Python comes back, also from state, and under an expression's name as key."""
    feed(lab, random.Random(2), 2)
    nested = source(lab, None).select(
        F.upper("user").alias("who"), "x", F.struct("s", F.array("d", "d").alias("ds")).alias("part"),
        F.create_map(F.coalesce("s", F.lit("-")), F.struct("raw", "day")).alias("named"), F.lit(1).alias("one"),
    )  # fmt: skip
    keys = holdfast.stream(nested).groupBy(F.lower("who").alias("user"))
    for frame, query in ((keys.top(3, by="x", emit="changes"), "top"), (keys.latest(by="x"), "latest")):
        batches = lab.run(frame, query)
        rows = [row for rows in batches for row in rows]
        assert rows
        assert {*rows[0]} >= {"user", "who", "x", "part", "named", "one"}
        held = holdfast.read_state(lab.spark, lab.folder / query, query).to_pylist()
        shown = [repr({name: row[name] for name in ("who", "part", "named")}) for row in rows]
        assert held
        assert all(repr({name: row[name] for name in ("who", "part", "named")}) in shown for row in held)


def test_an_aggregate_of_functions_of_a_user_has_one_type_and_a_name(lab: Lab) -> None:
    """That of its column, where none is given."""
    grouped = holdfast.stream(lab.spark.range(1)).groupBy("id")
    assert grouped.agg(spread("id"), spread(F.col("id")).alias("b")).columns == ["id", "aggregate(id)", "b"]
    functions: dict[str, Any] = dict.fromkeys(("init", "merge", "finish"), len)
    with pytest.raises(ParseException):
        grouped.agg(two=holdfast.aggregate("id", "int, b int", "n int", **functions))
    with pytest.raises(InvalidArgumentError, match="init must be a function"):
        holdfast.aggregate("id", "int", "n int", **{**functions, "init": 3})


def test_an_error_before_the_shuffle_names_the_operator(lab: Lab) -> None:
    """There a user's functions run too, where keys repeat."""

    def failing(values: pa.Array) -> dict[str, pa.Array]:
        raise ValueError(f"{len(values) // len(values)} value too many")

    own = holdfast.aggregate("i", "int", "n int", failing, lambda _, states: {"n": states["n"]}, lambda s: s["n"])
    feed(lab, random.Random(1), 1, rows=9000)
    with pytest.raises(StreamingQueryException) as caught:
        lab.run(holdfast.stream(source(lab)).groupBy("user").agg(own, name="totals"))
    what, operator, batch, to_do = holdfast.explain(caught.value).splitlines()
    assert (what, operator) == ("what:        ValueError: 1 value too many", "operator:    totals")
    assert batch == "micro-batch: 0"
    assert "correct failing (test_operators.py" in to_do


def test_an_aggregate_is_added_and_another_left_out(lab: Lab) -> None:
    """What is added begins with the next rows; what is left out comes back with what it held."""

    def run(**aggregates: holdfast.Aggregate) -> dict[Any, Any]:
        rows = lab.run(holdfast.stream(lab.source()).groupBy("key").agg(**aggregates, name="totals"))[-1]
        return {row.pop("key"): row for row in rows}

    lab.feed([("a", 1), ("b", 2)])
    assert run(n=holdfast.count())["a"] == {"n": 1}
    lab.feed([("a", 5)])
    assert run(n=holdfast.count(), worst=holdfast.max("v")) == {"a": {"n": 2, "worst": 5}}
    lab.feed([("a", 3), ("b", 1)])
    assert run(worst=holdfast.max("v")) == {"a": {"worst": 5}, "b": {"worst": 1}}
    lab.feed([("a", 1)])
    for changed in ({"n": holdfast.sum("v")}, {"worst": holdfast.min("v")}):
        with pytest.raises(StreamingQueryException, match="was computed by another aggregate"):
            run(**changed)


@pytest.mark.all
def test_windows_of_another_length_are_refused(lab: Lab) -> None:
    """Stored rows are of the old windows."""

    def run(length: str) -> None:
        lab.run(
            holdfast.stream(source(lab)).groupBy("user").window("at", length).agg(n=holdfast.count()), mode="append"
        )

    feed(lab, random.Random(1), 2)
    run("1 hour")
    feed(lab, random.Random(1), 1)
    run("60 minutes")
    feed(lab, random.Random(1), 1)
    with pytest.raises(StreamingQueryException, match="the window has changed"):
        run("2 hours")


def test_a_watermark_without_delay_finds_duplicates_too(lab: Lab) -> None:
    """Spark takes a delay of nothing, which as a window's length it refuses."""
    feed(lab, random.Random(1), 1)
    assert holdfast.stream(source(lab, "0 seconds")).dropDuplicatesWithinWatermark(["user"]).isStreaming


def test_the_operators_of_the_guide_are_defined(lab: Lab) -> None:
    """What docs/operators.md shows first."""
    lab.feed([("a", 1)])
    at, keys = "timestamp_millis(v) as at", [f"key as `{name}`" for name in ("id", "user", "item", "order", "currency")]
    df = lab.source().selectExpr(*keys, at, "v as delay", "v as price")
    payments = lab.source().selectExpr(keys[3], "timestamp_millis(v) as paid").withWatermark("paid", "10 minutes")
    rates = lab.source().selectExpr(keys[4], at, "v as rate").withWatermark("at", "10 minutes")
    names: dict[str, Any] = {"df": df, "holdfast": holdfast, "payments": payments, "rates": rates}
    block = block_with("docs/operators.md", "dropDuplicatesWithinWatermark")
    for line in filter(None, block.splitlines()):
        frame = eval(line, names) if not line.startswith("events =") else exec(line, names)  # the document is ours
        assert frame is None or frame.isStreaming


def sessions_by(key: str) -> Callable[[Any], Any]:
    """Return a definition with the key under another name."""

    def define(stream: Any) -> Any:
        named = holdfast.stream(stream.df.withColumnRenamed("user", key)).groupBy(key)
        return named.session("at", "1 minute").agg(n=holdfast.count())

    return define


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda s: s.groupBy("user").agg(), InvalidArgumentError, "agg takes holdfast's aggregates"),
        (lambda s: s.groupBy("user").agg(F.count("*")), InvalidArgumentError, "agg takes holdfast's aggregates"),
        (lambda s: s.groupBy("user").agg(n=holdfast.sum("nope")), AnalysisException, "nope"),
        (lambda s: s.groupBy("user").agg(n=holdfast.sum("s")), InvalidArgumentError, "no sum of this type"),
        (lambda s: s.groupBy("user").agg(n=holdfast.any("i")), AnalysisException, "bool_or"),
        (lambda s: s.groupBy("user").agg(n=holdfast.count(), outputMode="append"), InvalidArgumentError, "is final"),
        (lambda s: s.groupBy("user").agg(n=holdfast.count(), outputMode="complete"), InvalidArgumentError, "by key"),
        (
            lambda s: s.groupBy("user").agg(n=holdfast.approx_count_distinct(F.struct("x"))),
            InvalidArgumentError,
            "no approx_count_distinct of this type",
        ),
        (lambda s: holdfast.approx_count_distinct("x", 0.001), InvalidArgumentError, "at least 0.0022"),
        (
            lambda s: s.groupBy("user").agg(n=holdfast.percentile_approx("s", 0.5)),
            InvalidArgumentError,
            "no percentile_approx of this type",
        ),
        (lambda s: s.groupBy("user").agg(n=holdfast.percentile_approx("x", 2)), AnalysisException, "OUT_OF_RANGE"),
        (
            lambda s: s.groupBy("user").agg(n=holdfast.max_by("x", F.array("s"))),
            InvalidArgumentError,
            "no max_by of this type",
        ),
        (lambda s: s.groupBy("user").agg(user=holdfast.count()), InvalidArgumentError, "names a column twice"),
        (lambda s: s.groupBy("user").agg(n=holdfast.count(), name="a/b"), InvalidArgumentError, "cannot name"),
        (lambda s: s.groupBy("at").agg(n=holdfast.count()), InvalidArgumentError, "never expire"),
        (
            lambda s: s.groupBy(F.window("at", "1 hour")).agg(n=holdfast.count()),
            InvalidArgumentError,
            "use groupBy(.*).window",
        ),
        (lambda s: s.groupBy("user").window("at", "1 parsec"), AnalysisException, "parsec"),
        (lambda s: s.groupBy("user").session("at", "0 seconds"), InvalidArgumentError, "positive duration"),
        (lambda s: s.groupBy("user").session("at", "-1 minute"), InvalidArgumentError, "positive duration"),
        (lambda s: s.groupBy("user").session("at", "1 parsec"), InvalidArgumentError, "positive duration.*parsec"),
        (lambda s: s.dropDuplicates(["nope"]), AnalysisException, "nope"),
        (lambda s: s.groupBy("user").top(0, by="x"), InvalidArgumentError, "a number of rows"),
        (lambda s: s.groupBy("user").top(3, by="nope"), AnalysisException, "nope"),
        (lambda s: s.groupBy("user").top(3, by="user"), InvalidArgumentError, "by names a grouping column"),
        (lambda s: s.groupBy("user").top(3, by=[]), InvalidArgumentError, "by must be a column name"),
        (lambda s: s.groupBy("user").top(3, by="x", ascending=[True, False]), InvalidArgumentError, "one for each"),
        (lambda s: s.groupBy("user").top(3, by="x", emit="rows"), InvalidArgumentError, "'list' or 'changes'"),
        (
            lambda s: holdfast.stream(s.df.withColumn("a", F.array("x"))).groupBy("user").latest(by="a"),
            InvalidArgumentError,
            "ranked by numbers.*column=a",
        ),
        (
            lambda s: holdfast.stream(s.df.withColumn("place", F.lit(1))).groupBy("user").top(3, by="x"),
            InvalidArgumentError,
            "rename it.*column=place",
        ),
        (lambda s: s.dropDuplicates(["user"], ttl=5), InvalidArgumentError, "a positive duration"),
        (lambda s: s.dropDuplicates(["user"], ttl="soon"), InvalidArgumentError, "a positive duration .*soon"),
        (lambda s: s.dropDuplicates(["user"], ttl="-1 day"), InvalidArgumentError, "a positive duration"),
        (lambda s: s.dropDuplicates(["user"], ttl="1 month"), InvalidArgumentError, "of weeks, days or shorter"),
        (
            lambda s: s.groupBy(F.col("user").alias("__holdfast_state.n")).agg(n=holdfast.count()),
            InvalidArgumentError,
            "rename it.*key=__holdfast_state.n",
        ),
        *(
            (sessions_by(name), InvalidArgumentError, f"rename it.*key={name}")
            for name in ("window_start", "session_start")
        ),
    ],
)
def test_a_wrong_definition_says_so(lab: Lab, wrong: Callable[[Any], Any], error: type[Exception], text: str) -> None:
    """Nothing has run then; where Spark has an error for it, it is Spark's."""
    feed(lab, random.Random(1), 1)
    with pytest.raises(error, match=text):
        wrong(holdfast.stream(source(lab)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda s: s.groupBy("user").window("at", "1 hour").agg(n=holdfast.count()),
        lambda s: s.groupBy("user").session("at", "1 hour").agg(n=holdfast.count()),
        lambda s: s.dropDuplicatesWithinWatermark(["user"]),
    ],
)
def test_what_needs_a_watermark_says_so(lab: Lab, wrong: Callable[[Any], Any]) -> None:
    """Without it nothing is ever over."""
    feed(lab, random.Random(1), 1)
    with pytest.raises(HoldfastError, match="withWatermark"):
        wrong(holdfast.stream(source(lab, None)))
