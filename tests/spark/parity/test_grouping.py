"""What ``groupBy`` takes and refuses, and the keys that it gives: Spark's own and ours side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyspark
import pytest
from pyspark.errors import AnalysisException, PySparkIndexError, PySparkTypeError
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from holdfast.errors import InvalidArgumentError
from tests.spark.parity.engines import MEMORY, SPARK, Engine, Open, configured

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.state import GroupState

pytestmark = [pytest.mark.spark]

Keys = Callable[["DataFrame"], tuple[Any, ...]]


def show(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Show the key and the names of the frame's columns, and how often the key was there."""
    (n,) = state.getOption or (0,)
    state.update((n + 1,))
    for frame in frames:
        yield pd.DataFrame({"key": [repr(key)], "columns": [repr(frame.to_numpy()[:, 2:].tolist())], "n": [n]})


def source(spark: SparkSession, *columns: Any) -> DataFrame:
    """Return a stream that is never run."""
    return spark.readStream.format("rate").load().selectExpr(
        "'a' as a", "value as b", "struct('x' as x, 1 as y) as s", "timestamp as at"
    ).select(*columns or ["*"])  # fmt: skip


def by_spark(frame: DataFrame, keys: tuple[Any, ...]) -> None:
    """Define Spark's operator; its schema is asked for, since on Spark Connect nothing is looked at before."""
    output = frame.groupBy(*keys).applyInPandasWithState(show, "key string", "n long", "update", "NoTimeout")
    assert output.schema


# Spark before 4.2 says some things in other words, and refuses tuples and bytes, both as something that is no column.
IS_OLD = pyspark.__version__.startswith(("4.0.", "4.1."))
WRONG_TYPE = "(NOT_COLUMN_OR_STR|NOT_LIST_OF_COLUMN_OR_STR)" if IS_OLD else "NOT_EXPECTED_TYPE"
TWO_EVENT_TIMES = "More than one event time columns" if IS_OLD else "MULTIPLE_EVENT_TIME_COLUMNS"
NEWER = {"tuple", "bytes"} if IS_OLD else set()

TAKEN: dict[str, tuple[Keys, list[str]]] = {
    "list": (lambda _: (["a", "b"],), ["a", "b"]),
    "tuple": (lambda _: (("b", "a"),), ["b", "a"]),
    "ordinals": (lambda _: (2, 1), ["b", "a"]),
    "ordinals in a list": (lambda _: ([2, "a"],), ["b", "a"]),
    "a name twice": (lambda _: ("a", "a"), ["a", "a"]),
    "in another case": (lambda _: ("b", "B"), ["b", "b"]),
    "name and column": (lambda df: ("a", F.col("a"), df["a"], df.a, 1), ["a"] * 5),
    "backticks": (lambda _: ("`a`", "b"), ["a", "b"]),
    "a struct": (lambda _: ("s",), ["s"]),
}

REFUSED: dict[str, tuple[Keys, type[Exception], str]] = {
    "unknown": (lambda _: ("nope",), AnalysisException, "UNRESOLVED_COLUMN.*nope"),
    "unknown column": (lambda _: ("a", F.col("nope")), AnalysisException, "UNRESOLVED_COLUMN.*nope"),
    "unknown field": (lambda _: ("s.nope",), AnalysisException, "FIELD_NOT_FOUND.*nope"),
    "empty": (lambda _: ("",), AnalysisException, "UNRESOLVED_COLUMN"),
    "half a name": (lambda _: ("`a",), AnalysisException, "INVALID_ATTRIBUTE_NAME_SYNTAX"),
    "aggregate": (lambda _: (F.sum("b"),), AnalysisException, ""),
    "ordinal 0": (lambda _: (0,), PySparkIndexError, "INDEX_NOT_POSITIVE"),
    "ordinal -1": (lambda _: ([-1],), PySparkIndexError, "INDEX_NOT_POSITIVE"),
    "ordinal 9": (lambda _: (9,), IndexError, "out of range"),
    "bool": (lambda _: (True,), PySparkTypeError, f"{WRONG_TYPE}.*bool"),
    "float": (lambda _: (1.5,), PySparkTypeError, f"{WRONG_TYPE}.*float"),
    "none": (lambda _: (None,), PySparkTypeError, f"{WRONG_TYPE}.*NoneType"),
    "list and name": (lambda _: (["a"], "b"), PySparkTypeError, f"{WRONG_TYPE}.*list"),
    "list in a list": (lambda _: ([["a"]],), PySparkTypeError, f"{WRONG_TYPE}.*list"),
    "bytes": (lambda _: (b"a",), IndexError, "out of range"),
}


def test_what_spark_takes(spark: SparkSession) -> None:
    """Lists, ordinals, keys that are given again by whatever means: each is the column of the input that it is."""
    frame = source(spark)
    for name, (keys, columns) in TAKEN.items():
        if name not in NEWER:
            by_spark(frame, keys(frame))
        grouping = holdfast.stream(frame).groupBy(*keys(frame)).grouping
        assert [grouping.keys[place].column for place in grouping.given] == columns, name
        assert len(grouping.keys) == len(set(columns)), name


def test_what_spark_refuses(spark: SparkSession) -> None:
    """With the same class of error, and the same words."""
    frame = source(spark)
    for name, (keys, error, words) in REFUSED.items():
        for define in (by_spark, lambda frame, keys: holdfast.stream(frame).groupBy(*keys))[name in NEWER :]:
            with pytest.raises(error, match=f"(?s){words}") as failed:
                define(frame, keys(frame))
            assert not isinstance(failed.value, InvalidArgumentError), name


def test_names_that_stand_for_two_columns(spark: SparkSession) -> None:
    """Grouped by or not, both refuse them; where the session tells upper from lower case, they are two."""
    frame = source(spark, "a", F.col("b").alias("A"), "at")
    for define in (by_spark, lambda frame, keys: holdfast.stream(frame).groupBy(*keys)):
        for keys in (("a",), ("A",), (2,), ("at",)):
            with pytest.raises(AnalysisException, match=r"AMBIGUOUS_REFERENCE"):
                define(frame, keys)
    with configured(spark, {"spark.sql.caseSensitive": "true"}):
        grouping = holdfast.stream(frame).groupBy("A", F.col("a")).grouping
        assert [key.column for key in grouping.keys] == ["A", "a"]
        by_spark(frame, ("A", "a"))


def test_keys_that_spark_does_not_take(spark: SparkSession) -> None:
    """Expressions, and fields by their path: a column each. What several columns are meant by has no one name."""
    stream = holdfast.stream(source(spark))
    grouping = stream.groupBy("s.x", F.lower("a").alias("low"), F.col("b").alias("c"), "b").grouping
    assert [(key.field.name, key.is_expression) for key in grouping.keys] == [
        ("x", True), ("low", True), ("c", True), ("b", False)
    ]  # fmt: skip
    for keys, words in (
        ((), "at least one key"),
        (([],), "at least one key"),
        (("*",), "one column"),
        ((F.col("s.*"),), "one column"),
        (("a", F.col("b").alias("a")), r"same name.*alias.*repeated=\['a'\]"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            stream.groupBy(*keys)


def test_keys_and_columns_that_stand_twice(run_on: Open) -> None:
    """The function gets the same keys and frames; its state is that of the key alone, however that is written."""

    def outcome(engine: Engine) -> list[list[tuple[Any, ...]]]:
        with run_on(engine) as run:
            run.feed([("a", 1, "x"), (None, 2, "y")])
            frame = run.source(delay=None).select("do", "key", "v", "v", "key")
            arguments = (show, "key string, columns string, n long", "n long", "update", "NoTimeout")
            run.run(run.apply(frame, [["key", 3, "Key"]], *arguments))
            run.feed([("a", 1, "x")])
            run.run(run.apply(frame, ["key", "v", F.col("key")], *arguments))
            return [sorted(batch) for batch in run.batches]

    expected = [
        [("('a', np.int64(0), 'a')", "[[0, 0, 'a']]", 0), ("(None, np.int64(1), None)", "[[1, 1, None]]", 0)],
        [("('a', np.int64(0), 'a')", "[[0, 0, 'a']]", 1)],
    ]
    assert outcome(SPARK) == expected
    assert outcome(MEMORY) == expected


def test_two_event_time_columns(spark: SparkSession, run_on: Open) -> None:
    """Spark refuses them when the query runs, ours when it is defined; dropping one helps."""
    words = r"MULTIPLE_EVENT_TIME_COLUMNS.*\(t1.*, ?at.*\)"

    def joined(run: Any) -> DataFrame:
        right = run.source("key string, at timestamp")
        left = right.select(F.col("key").alias("k1"), F.col("at").alias("t1"))
        return left.join(right, F.expr("k1 = key and t1 = at"))

    arguments = (show, "key string, columns string, n long", "n long", "append", "NoTimeout")
    with run_on(SPARK) as run:
        run.feed([("a", 1, "")])
        assert TWO_EVENT_TIMES in str(run.failure(run.apply(joined(run), ["key"], *arguments), "append"))
    with run_on(MEMORY) as run:
        run.feed([("a", 1, "")])
        for frame in (joined(run), run.source().withColumn("t1", F.col("at")).select("t1", "at", "key")):
            for timeout in ("NoTimeout", "EventTimeTimeout"):
                with pytest.raises(AnalysisException, match=words) as refused:
                    run.apply(frame, ["key"], *arguments[:-1], timeout)
                assert refused.value.getCondition() == "MULTIPLE_EVENT_TIME_COLUMNS"
        assert run.apply(joined(run).drop("t1"), ["key"], *arguments).schema
        assert run.apply(run.source().select("key", "at", "At", "at"), ["key"], *arguments).schema
        with pytest.raises(AnalysisException, match=words):
            holdfast.stream(joined(run)).groupBy("key").applyInArrowWithState(show, "n long", "n long", "append")  # type: ignore[arg-type]
        with configured(spark, {"spark.sql.streaming.statefulOperator.allowMultiple": "false"}):
            assert run.apply(joined(run), ["key"], *arguments).schema, "what Spark takes then"
