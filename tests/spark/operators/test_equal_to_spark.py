"""Operators beside Spark's own on the same random streams, micro-batch by micro-batch, across a restart."""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from holdfast import savepoints
from tests.spark.answers import Batches, Questions
from tests.spark.conftest import Lab

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark

SCHEMA = (
    "user string, item double, at timestamp, i int, l bigint, x double, f float, d decimal(10,2), w decimal(38,6), "
    "s string, b boolean, day date, raw binary"
)
NOON = dt.datetime(2026, 3, 28, 12, tzinfo=dt.UTC)  # clocks go forward in the following night
AGGREGATES: dict[str, Callable[[], holdfast.Aggregate]] = {
    "n": holdfast.count,
    "n_x": lambda: holdfast.count("x"),
    "sum_i": lambda: holdfast.sum("i"),
    "sum_x": lambda: holdfast.sum(F.col("x") * 2),
    "sum_f": lambda: holdfast.sum("f"),
    "sum_d": lambda: holdfast.sum("d"),
    "mean_l": lambda: holdfast.mean("l"),
    "mean_x": lambda: holdfast.avg("x"),
    "mean_d": lambda: holdfast.mean("d"),
    "mean_w": lambda: holdfast.mean("w"),
    "min_x": lambda: holdfast.min("x"),
    "max_x": lambda: holdfast.max("x"),
    "max_f": lambda: holdfast.max("f"),
    "min_s": lambda: holdfast.min("s"),
    "max_s": lambda: holdfast.max("s"),
    "max_d": lambda: holdfast.max("d"),
    "min_day": lambda: holdfast.min("day"),
    "max_raw": lambda: holdfast.max("raw"),
    "last_at": lambda: holdfast.max("at"),
    "any_b": lambda: holdfast.any("b"),
    "all_b": lambda: holdfast.all("b"),
    "sd_i": lambda: holdfast.stddev("i"),
    "var_i": lambda: holdfast.variance("i"),
    "sd_pop": lambda: holdfast.stddev_pop("l"),
    "var_pop": lambda: holdfast.var_pop("l"),
}


def feed(lab: Lab, chance: random.Random, files: int, *, rows: int = 60) -> None:
    """Add micro-batches: late rows, repeated ones, nulls, NaN, -0.0; one of them may be empty."""
    for _ in range(files):
        at = NOON + dt.timedelta(minutes=30 * lab.files)
        n = 0 if chance.random() < 0.1 else rows
        table = [_row(chance, at) for _ in range(n)]
        names = [part.split()[0] for part in SCHEMA.split(", ")]
        columns = {name: [row[name] for row in table] for name in names}
        lab.feed(pa.table({name: pa.array(columns[name], TYPES[name]) for name in names}))


TYPES = {
    "user": pa.string(),
    "item": pa.float64(),
    "at": pa.timestamp("us", "UTC"),
    "i": pa.int32(),
    "l": pa.int64(),
    "x": pa.float64(),
    "f": pa.float32(),
    "d": pa.decimal128(10, 2),
    "w": pa.decimal128(38, 6),
    "s": pa.string(),
    "b": pa.bool_(),
    "day": pa.date32(),
    "raw": pa.binary(),
}


def _row(chance: random.Random, at: dt.datetime) -> dict[str, Any]:
    def some(*values: Any) -> Any:
        return chance.choice([None, *values])

    odd = chance.random() < 0.1
    return {
        "user": some("ann", "bob", "cem", ""),
        "item": some(0.0, -0.0, math.nan, 1.5),
        # Whole seconds, now and then far too late; a quarter of them on a bound of windows and gaps.
        "at": some(
            *(at + dt.timedelta(seconds=chance.choice([60, 300, 1]) * chance.randint(-30, 30)) for _ in range(9)),
            at - dt.timedelta(hours=3),
        ),
        "i": some(*range(-5, 6)),
        "l": some(chance.randint(-(1 << 40), 1 << 40)),
        "x": some(*[math.nan, math.inf, -0.0] if odd else [chance.randint(-40, 40) / 4 for _ in range(5)]),
        "f": some(0.5, 0.25, -1.0, 3.0),
        "d": some(Decimal(chance.randint(-999, 999)) / 100),
        "w": some(Decimal(chance.randint(-(10**20), 10**20)) / 10**6),
        "s": some("", "a", "b", "é", "zz"),
        "b": some(True, False),
        "day": some(dt.date(1969, 1, 1), dt.date(2026, 1, 2)),
        "raw": some(b"", b"\xff", b"a"),
    }


def source(lab: Lab, delay: str | None = "20 minutes") -> DataFrame:
    df = lab.source(SCHEMA)
    return df if delay is None else df.withWatermark("at", delay)


def compare(
    lab: Lab,
    seed: int,
    ours: Callable[[], DataFrame],
    spark: Callable[[], DataFrame],
    mode: str,
    files: int = 3,
    questions: Questions | None = None,
) -> Batches:
    """Run both over some files, restart, and run them over more; they show the same rows in the same micro-batches."""
    chance = random.Random(seed)
    found: Batches = []
    expected: Batches = []
    for _ in range(2):
        feed(lab, chance, files)
        one, other = ours(), spark()
        assert shape(one) == shape(other)
        found += shown_by(lab, one, "ours", mode)
        answer = partial(shown_by, lab, other, "spark", mode)
        expected += answer() if questions is None else questions.ask("spark", answer)
    assert len(found) == len(expected)
    for mine, its in zip(found, expected, strict=True):
        assert [row for row in mine if row not in its] == [row for row in its if row not in mine]
        assert len(mine) == len(its)
    return found


def require_to_go_on(
    lab: Lab, shown: Callable[[str], Batches], chance: random.Random, batches: tuple[int, int]
) -> None:
    """Check that a query shows from a savepoint what it would have shown: with other shards, on another backend.

    `batches`: so many before the savepoint, and after it.
    """
    feed(lab, chance, batches[0])
    shown("query")
    savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    feed(lab, chance, batches[1])
    expected = shown("query")
    lab.configure({"state.dir": str(lab.folder / "again-state"), "backend": "rocksdb"})
    savepoints.restore(lab.spark, lab.folder / "savepoints", "one", lab.folder / "again", shards=3)
    assert shown("again") == expected
    assert expected


def shown_by(lab: Lab, frame: DataFrame, query: str, mode: str) -> Batches:
    """Run a query; return the rows of each micro-batch that has any.

    Spark has more micro-batches without rows: for each new watermark, whether anything waits for it or not.
    """
    batches = lab.run(frame, query, mode)
    return [sorted((tuple(map(canonical, row.values())) for row in rows), key=repr) for rows in batches if rows]


def shape(frame: DataFrame) -> list[Any]:
    """Return the columns of a frame; the mark of a watermark, which ours do not hand on, is left out."""
    return [(field.name, field.dataType, field.nullable) for field in frame.schema]


def canonical(value: Any) -> Any:
    """Return a value of which equal ones are equal, whatever the order in which floats were added up."""
    if isinstance(value, dict):
        return {name: canonical(part) for name, part in value.items()}
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else float(f"{value:.11g}") + 0.0
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC)  # whichever class its time zone has
    return value


def unordered(value: Any) -> Any:
    """Return a value whose lists were collected in no fixed order."""
    if isinstance(value, dict):
        return {name: unordered(part) for name, part in value.items()}
    return sorted(map(canonical, value), key=repr) if isinstance(value, list) else canonical(value)


def asked(recorded: Sequence[Any], *others: Any) -> list[Any]:
    """Return cases: those of which Spark's answer is recorded, and others, of which ``make test-all`` asks it."""
    later = [pytest.mark.all, pytest.mark.live]
    return [*recorded, *(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=later) for case in others)]


SEEDS = asked([1], 2, 3, 4, 5)
SMOKE_SEEDS = asked([pytest.param(1, marks=pytest.mark.smoke)], 2, 3, 4, 5)
#: In each output mode, by length, slide and start.
HOUR, SLIDING, SHIFTED = (
    ("1 hour", None, None),
    ("1 hour", "20 minutes", None),
    ("50 minutes", "50 minutes", "7 minutes"),
)
WINDOWS = asked(
    [("append", *SLIDING), ("update", *HOUR)],
    *[("append", *HOUR), ("append", *SHIFTED), ("update", *SLIDING), ("update", *SHIFTED)],
)


@pytest.mark.parametrize("seed", SMOKE_SEEDS)
def test_aggregates_by_key(lab: Lab, questions: Questions | None, seed: int) -> None:
    """Values, types and rows of each micro-batch are Spark's, for all aggregates; no row is too late."""
    compare(
        lab,
        seed,
        lambda: holdfast.stream(source(lab)).groupBy("user", "item").agg(**made()),
        lambda: source(lab).groupBy("user", "item").agg(*sparks()),
        "update",
        questions=questions,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("mode", "length", "slide", "start"), WINDOWS)
def test_windows(
    lab: Lab, questions: Questions | None, seed: int, mode: str, length: str, slide: str | None, start: str | None
) -> None:
    """Windows are shown when Spark shows them, and take the late rows that Spark's take."""
    shown = compare(
        lab,
        seed,
        lambda: (
            holdfast.stream(source(lab))
            .groupBy("user")
            .window("at", length, slide, start)
            .agg(**made("n", "sum_x", "mean_d", "max_s", "sd_i"), outputMode=mode)
        ),
        lambda: (
            source(lab)
            .groupBy("user", F.window("at", length, slide, start))
            .agg(*sparks("n", "sum_x", "mean_d", "max_s", "sd_i"))
        ),
        mode,
        questions=questions,
    )
    assert sum(map(len, shown)) > 20


@pytest.mark.parametrize("seed", SMOKE_SEEDS)
def test_sessions(lab: Lab, questions: Questions | None, seed: int) -> None:
    """Sessions grow together as Spark's do: also those that touch, and those that a late row joins."""
    shown = compare(
        lab,
        seed,
        lambda: (
            holdfast.stream(source(lab))
            .groupBy("user", "item")
            .session("at", "5 minutes")
            .agg(**made("n", "sum_x", "mean_d", "max_s", "sd_i"))
        ),
        lambda: (
            source(lab)
            .groupBy("user", "item", F.session_window("at", "5 minutes"))
            .agg(*sparks("n", "sum_x", "mean_d", "max_s", "sd_i"))
        ),
        "append",
        questions=questions,
    )
    assert sum(map(len, shown)) > 20


@pytest.mark.all
@pytest.mark.live
@pytest.mark.parametrize("seed", [1, 2])
def test_lists_and_sets_of_values_and_estimates(lab: Lab, seed: int) -> None:
    """Of windows, in which Spark's streams have no distinct values but in a set; an empty one is no null."""
    hashed = ["x", "f", "w", "s"]  # each is 52 columns of Spark's state
    # Not w, which Spark rounds to doubles, and not x: when Spark merges, a NaN is anywhere.
    ranked = ["item", "at", "i", "l", "f", "d", "day"]

    def ours(df: DataFrame) -> DataFrame:
        lists = {f"list_{name}": holdfast.collect_list(name) for name in TYPES}
        sets = {f"set_{name}": holdfast.collect_set(name) for name in TYPES}
        counts = {f"count_{name}": holdfast.count_distinct(name) for name in TYPES}
        near = {f"near_{name}": holdfast.approx_count_distinct(name) for name in hashed}
        half = {f"half_{name}": holdfast.percentile_approx(name, 0.5) for name in ranked}
        columns = {**lists, **sets, **counts, **near, **half}
        return holdfast.stream(df).groupBy("user", "item").window("at", "1 hour").agg(**columns)

    def sparks(df: DataFrame) -> DataFrame:
        lists = [F.collect_list(name).alias(f"list_{name}") for name in TYPES]
        sets = [F.collect_set(name).alias(f"set_{name}") for name in TYPES]
        near = [F.approx_count_distinct(name).alias(f"near_{name}") for name in hashed]
        half = [F.percentile_approx(name, 0.5).alias(f"half_{name}") for name in ranked]
        found = df.groupBy("user", "item", F.window("at", "1 hour")).agg(*lists, *sets, *near, *half)
        counts = {f"count_{name}": F.size(f"set_{name}").cast("long") for name in TYPES}
        before = [name for name in found.columns if not name.startswith(("near_", "half_"))]
        return found.withColumns(counts).select(*before, *counts, *found.columns[len(before) :])

    chance, shown = random.Random(seed), 0
    for _ in range(2):
        feed(lab, chance, 4)
        frames = {"ours": ours(source(lab)), "spark": sparks(source(lab))}
        assert shape(frames["ours"]) == shape(frames["spark"])
        found, expected = (
            [sorted(map(unordered, rows), key=repr) for rows in lab.run(frame, query, "append") if rows]
            for query, frame in frames.items()
        )
        assert found == expected
        shown += sum(map(len, found))
    assert shown > 20


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("delay", asked(["1 hour"], "0 seconds"))
def test_duplicates_within_the_watermark(lab: Lab, questions: Questions | None, seed: int, delay: str) -> None:
    """A key comes once, and again once Spark has forgotten it."""

    # Which of a micro-batch's duplicates comes is chance, so only keys are compared; and when a key is forgotten, which
    # the time of the first row says, is the same for all rows of a micro-batch.
    def timed() -> DataFrame:
        return source(lab, None).withColumn("at", F.date_trunc("hour", "at")).withWatermark("at", delay)

    shown = compare(
        lab,
        seed,
        lambda: holdfast.stream(timed()).dropDuplicatesWithinWatermark(["user", "i", "at"]).select("user", "i", "at"),
        lambda: timed().dropDuplicatesWithinWatermark(["user", "i", "at"]).select("user", "i", "at"),
        "append",
        files=5,
        questions=questions,
    )
    assert sum(map(len, shown)) > 20


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("subset", asked([["user", "at"]], ["user", "s"]), ids=",".join)
@pytest.mark.parametrize("delay", asked(["20 minutes"], None))
def test_duplicates(lab: Lab, questions: Questions | None, seed: int, subset: list[str], delay: str | None) -> None:
    """A key comes once; where the watermark's column is a part of it, it is forgotten, and its duplicates are late."""
    compare(
        lab,
        seed,
        lambda: holdfast.stream(source(lab, delay)).dropDuplicates(subset).select(*subset),
        lambda: source(lab, delay).dropDuplicates(subset).select(*subset),
        "append",
        questions=questions,
    )


def made(*names: str) -> dict[str, holdfast.Aggregate]:
    return {name: AGGREGATES[name]() for name in names or AGGREGATES}


def sparks(*names: str) -> list[Any]:
    """Return Spark's own aggregates of these names."""
    return [aggregate.spark.alias(name) for name, aggregate in made(*names).items()]
