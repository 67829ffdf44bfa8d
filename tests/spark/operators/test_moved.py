"""Queries of Spark's own operators that go on with ours, with Spark's state: beside Spark's, which go on as well."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from holdfast import savepoints
from holdfast.errors import InvalidArgumentError
from tests.spark.answers import Batches
from tests.spark.conftest import Lab
from tests.spark.operators.test_chains import sessions_of_distinct, sessions_of_distinct_by_spark
from tests.spark.operators.test_equal_to_spark import canonical, feed, made, shown_by, source, sparks
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark

#: What can be moved, by column, in the order of the query.
FUNCTIONS = {
    "n": "count",
    "n_x": "count",
    "sum_i": "sum",
    "sum_x": "sum",
    "sum_d": "sum",
    "mean_l": "mean",
    "mean_x": "avg",
    "mean_d": "mean(decimal(10,2))",
    "mean_w": "mean",
    "min_x": "min",
    "max_x": "max",
    "max_s": "max",
    "max_d": "max",
    "min_day": "min",
    "max_raw": "max",
    "last_at": "max",
    "any_b": "any",
    "all_b": "all",
    "sd_i": "stddev",
    "var_i": "variance",
    "sd_pop": "stddev_pop",
    "var_pop": "var_pop",
}
FEW = {name: FUNCTIONS[name] for name in ("n", "sum_x", "mean_d", "max_s", "sd_i")}

#: Of a micro-batch of one file, rows arrive in its order.
OTHERS: dict[str, tuple[str, Callable[[], holdfast.Aggregate]]] = {
    "near_x": ("approx_count_distinct", lambda: holdfast.approx_count_distinct("x")),
    "near_l": ("approx_count_distinct", lambda: holdfast.approx_count_distinct("l", 0.2)),
    "many_l": ("approx_count_distinct", lambda: holdfast.approx_count_distinct("l", 0.03)),
    "first_i": ("first", lambda: holdfast.first("i")),
    "last_s": ("last", lambda: holdfast.last("s")),
    "n": ("count", holdfast.count),
    "first_d": ("first(ignorenulls)", lambda: holdfast.first("d", ignorenulls=True)),
    "last_day": ("last(ignorenulls)", lambda: holdfast.last("day", ignorenulls=True)),
}


@dataclass(frozen=True)
class Moved:
    """An operator of Spark's, the same of ours, and what is said of it."""

    spark: Callable[[Lab], DataFrame]
    ours: Callable[[Lab], DataFrame]
    operators: str | dict[int, str]
    given: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "append"
    is_on_rocksdb: bool = False

    @property
    def names(self) -> list[str]:
        return [self.operators] if isinstance(self.operators, str) else list(self.operators.values())


def distinct(subset: list[str], delay: str | None, *, is_within: bool = False, **options: Any) -> Moved:
    """Return a deduplication; which of a micro-batch's duplicates comes is chance, so only keys are shown."""
    method = "dropDuplicatesWithinWatermark" if is_within else "dropDuplicates"

    def keys_of(frame: DataFrame) -> DataFrame:
        # Where nothing needs the time behind it, Spark's dropDuplicates loses the time, and drops no late rows.
        return frame.select(*subset, F.expr("if(unix_micros(at) = 1, 1, 0) AS one"))

    def timed(lab: Lab) -> DataFrame:
        if not is_within:
            return source(lab, delay)
        # When a key is forgotten, which its first row says, is the same for all rows of a micro-batch.
        hours = source(lab, None).withColumn("at", F.date_trunc("hour", "at"))
        return hours.withWatermark("at", str(delay))

    return Moved(
        lambda lab: keys_of(getattr(timed(lab), method)(subset)),
        lambda lab: keys_of(getattr(holdfast.stream(timed(lab)), method)(subset)),
        method,
        **options,
    )


def windows(mode: str, delay: str | None, *durations: str, **options: Any) -> Moved:
    return Moved(
        lambda lab: source(lab, delay).groupBy(F.window("at", *durations), "user").agg(*sparks(*FEW)),
        lambda lab: (
            holdfast.stream(source(lab, delay))
            .groupBy("user")
            .window("at", *durations)
            .agg(**made(*FEW), outputMode=mode)
            .select("window", "user", *FEW)
        ),
        "window",
        {"aggregates": FEW, "window": durations if len(durations) > 1 else durations[0]},
        mode,
        **options,
    )


def by_user_of_few_digits(lab: Lab, stream: Callable[[DataFrame], Any] = lambda df: df) -> Any:
    """Return rows with decimals that Spark adds up as integers."""
    return stream(source(lab).withColumn("few", F.col("d").cast("decimal(5,2)"))).groupBy("user")


MOVED = {
    "sessions": Moved(
        lambda lab: source(lab).groupBy("user", F.session_window("at", "5 minutes"), "item").agg(*sparks(*FEW)),
        lambda lab: (
            holdfast.stream(source(lab))
            .groupBy("user", "item")
            .session("at", "5 minutes")
            .agg(**made(*FEW))
            .select("user", "session_window", "item", *FEW)
        ),
        "session",
        {"aggregates": FEW},
    ),
    "distinct in a chain": Moved(
        sessions_of_distinct_by_spark,
        sessions_of_distinct,
        {0: "session", 1: "dropDuplicates"},
        {"aggregates": {"n": "count"}},
        is_on_rocksdb=True,
    ),
    "windows": windows("append", "20 minutes", "1 hour", "20 minutes"),
    "all aggregates": Moved(
        lambda lab: source(lab).groupBy("user", "item").agg(*sparks(*FUNCTIONS)),
        lambda lab: holdfast.stream(source(lab)).groupBy("user", "item").agg(**made(*FUNCTIONS)),
        "agg",
        {"aggregates": FUNCTIONS},
        "update",
    ),
    "decimals of few digits": Moved(
        lambda lab: by_user_of_few_digits(lab).agg(F.sum("few").alias("n"), F.avg("few").alias("mean")),
        lambda lab: by_user_of_few_digits(lab, holdfast.stream).agg(n=holdfast.sum("few"), mean=holdfast.mean("few")),
        "agg",
        {"aggregates": {"n": "sum(decimal(5,2))", "mean": "mean(decimal(5,2))"}},
        "update",
    ),
    "first, last and estimates": Moved(
        lambda lab: (
            source(lab).groupBy("user", "item").agg(*[made().spark.alias(n) for n, (_, made) in OTHERS.items()])
        ),
        lambda lab: (
            holdfast.stream(source(lab)).groupBy("user", "item").agg(**{n: made() for n, (_, made) in OTHERS.items()})
        ),
        "agg",
        {"aggregates": {name: function for name, (function, _) in OTHERS.items()}},
        "update",
    ),
    "distinct within the watermark": distinct(["user", "i", "at"], "1 hour", is_within=True),
    "distinct by time": distinct(["user", "at"], "20 minutes"),
    "distinct for good": distinct(["user", "i", "s"], "20 minutes"),
}


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("name", cases(list(MOVED)))
def test_a_query_of_sparks_goes_on_with_ours(lab: Lab, name: str, seed: int) -> None:
    """From the same positions, with state and watermark, other shards: rows and state as if it had been ours always."""
    case, chance = MOVED[name], random.Random(seed)
    at = lab.folder / "sparks", lab.folder / "savepoints"

    def whole() -> Batches:
        lab.configure({"state.dir": str(lab.folder / "whole-state")})
        return shown_by(lab, case.ours(lab), "whole", case.mode)

    with configured(lab.spark, NEEDED if case.is_on_rocksdb else {}):
        feed(lab, chance, 3)
        before = shown_by(lab, case.spark(lab), "sparks", case.mode)
        assert whole() == before
        savepoints.from_spark(lab.spark, *at, "one", case.operators, **case.given)
        assert savepoints.verify(at[1], "one") == []
        for operator in case.names:
            loaded = savepoints.load(lab.spark, at[1], "one", operator).drop("shard").toArrow().to_pylist()
            now = sorted((canonical(row) for row in loaded), key=repr)
            assert now == state(lab, "whole", operator)
        feed(lab, chance, 3)
        expected = shown_by(lab, case.spark(lab), "sparks", case.mode)
        assert whole() == expected
        held = [state(lab, "whole", operator) for operator in case.names]
        lab.configure({"state.dir": str(lab.folder / "again-state"), "backend": "rocksdb"})
        savepoints.restore(lab.spark, at[1], "one", lab.folder / "again", shards=3)
        assert shown_by(lab, case.ours(lab), "again", case.mode) == expected
        assert [state(lab, "again", operator) for operator in case.names] == held
    assert sum(map(len, before)) > 5
    assert expected


def state(lab: Lab, query: str, operator: str) -> list[Any]:
    """Return an operator's rows as they are read from outside."""
    rows = holdfast.read_state(lab.spark, lab.folder / query, operator).to_pylist()
    return sorted((canonical(row) for row in rows), key=repr)


@pytest.mark.all
def test_what_does_not_fit_is_refused(lab: Lab) -> None:
    """Each error says what to do, and no savepoint is left."""
    feed(lab, random.Random(1), 2)
    lab.run(MOVED["windows"].spark(lab), "windows", "append")
    lab.run(MOVED["distinct for good"].spark(lab), "distinct", "append")
    lab.run(source(lab).groupBy("user").agg(F.count("*"), F.collect_list("i")), "lists")
    lab.run(source(lab).agg(F.count("*")), "alone")
    lab.run(source(lab).groupBy(F.window("at", "1 hour")).agg(F.count("*")), "hours", "append")
    lab.run(sessions_of_distinct_by_spark(lab), "chain", "append")
    like_a_window = source(lab).withColumn("period", F.struct(F.col("at").alias("start"), F.col("at").alias("end")))
    for query, window in ("periods", F.window("at", "1 hour")), ("visits", F.session_window("at", "1 hour")):
        lab.run(like_a_window.groupBy("period", window).agg(F.count("*")), query, "append")
    renamed = source(lab).withColumnsRenamed({"user": "u", "at": "t"})
    lab.run(source(lab).join(renamed, F.expr("user = u AND at = t")), "join", "append")
    n = {"n": "count"}
    wrong: list[tuple[str, str | dict[int, str], dict[str, Any], str]] = [
        ("windows", "w", {}, "name the columns and functions.*buffers"),
        ("windows", "w", {"aggregates": FEW}, "repeat the durations"),
        ("windows", "w", {"aggregates": FEW, "window": "soon"}, "durations passed to Spark"),
        *(
            ("windows", "w", {"aggregates": FEW, "window": given}, "durations passed to Spark")
            for given in (["1 hour"] * 4, [], 3, [5])
        ),
        ("windows", "w", {"aggregates": FEW, "window": "1 hour"}, "have these durations"),
        ("windows", "w", {"aggregates": FEW, "window": ["1 hour", "20 minutes", "1 minute"]}, "have these durations"),
        ("windows", "w", {"aggregates": n, "window": ["1 hour", "20 minutes"]}, "does not match these aggregates"),
        ("windows", "w", {"aggregates": {7: n}}, "by operator number"),
        ("periods", "p", {"aggregates": n, "window": "1 hour"}, "just like the window"),
        ("visits", "v", {"aggregates": n}, "just like the window"),
        ("distinct", "d", {"aggregates": n}, "is for aggregations"),
        ("lists", "l", {"aggregates": {**n, "all": "collect_list"}}, "cannot be moved.*collect_list"),
        ("lists", "l", {"aggregates": n}, "cannot be moved.*collect_list"),
        ("alone", "a", {"aggregates": n}, "without keys"),
        ("hours", "h", {"aggregates": n, "window": "1 hour"}, "without keys"),
        ("chain", {0: "s", 1: "d"}, {"aggregates": n}, "only Spark's RocksDB"),
        ("join", "j", {}, "whose state cannot be moved"),
    ]
    for query, operators, given, text in wrong:
        with pytest.raises(InvalidArgumentError, match=text):
            savepoints.from_spark(lab.spark, lab.folder / query, lab.folder / "savepoints", "one", operators, **given)
    assert [one.savepoint for one in savepoints.listed(lab.folder / "savepoints")] in ([], [None])


@pytest.mark.all
def test_another_operator_than_was_moved_is_refused(lab: Lab) -> None:
    """The function of a column, and where windows lie, are remembered as of a query that was always ours."""
    feed(lab, random.Random(1), 2)
    case = MOVED["windows"]
    lab.run(case.spark(lab), "sparks", "append")
    at = lab.folder / "sparks", lab.folder / "savepoints"
    savepoints.from_spark(lab.spark, *at, "one", "window", **case.given)
    savepoints.restore(lab.spark, at[1], "one", lab.folder / "again")
    grouped = holdfast.stream(source(lab)).groupBy("user")
    for length, aggregates in (("2 hours", made(*FEW)), ("1 hour", {**made(*FEW), "n": holdfast.max("l")})):
        with pytest.warns(UserWarning, match="cannot continue the state"):
            grouped.window("at", length, "20 minutes").agg(**aggregates)
