"""What a function returns, and how it fails: on Spark's operator and on ours, the same rows and the same errors."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from tests.spark.parity.engines import FILESYSTEM, MEMORY, ROCKSDB, SPARK, Engine, Open, cause_of, engines
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

pytestmark = [pytest.mark.spark, pytest.mark.slow]

OUTPUT, STATE = "a long, b string", "n long"
RIGHT = pd.DataFrame({"a": [1], "b": ["x"]})

# By item: what a function returns that must not, and the error, which has the same words on every engine.
WRONG: dict[str, tuple[Any, str, str]] = {
    "R1 a frame": (RIGHT, "PySparkTypeError", "[UDF_RETURN_TYPE] .*iterable of pandas.DataFrame, but is DataFrame."),
    "R2 nothing": (None, "PySparkTypeError", "[UDF_RETURN_TYPE] .*should be iterable, but is NoneType."),
    "R2 a number": (5, "PySparkTypeError", "[UDF_RETURN_TYPE] .*should be iterable, but is int."),
    "R3 numbers": (
        [5],
        "PySparkTypeError",
        "[UDF_RETURN_TYPE] .*iterator of pandas.DataFrame, but is iterator of int.",
    ),
    "R3 a text": (
        "abc",
        "PySparkTypeError",
        "[UDF_RETURN_TYPE] .*iterator of pandas.DataFrame, but is iterator of str.",
    ),
    "R3 series": ([RIGHT["a"]], "PySparkTypeError", "[UDF_RETURN_TYPE] .*iterator of Series."),
    "R4 a column less": (
        [RIGHT[["a"]]],
        "PySparkRuntimeError",
        "[RESULT_COLUMN_SCHEMA_MISMATCH] .*Expected: 2 Actual: 1",
    ),
    "R4 a column more": (
        [RIGHT.assign(c=1)],
        "PySparkRuntimeError",
        "[RESULT_COLUMN_SCHEMA_MISMATCH] .*Expected: 2 Actual: 3",
    ),
    "R4 a column less, no rows": (
        [RIGHT[["a"]][:0]],
        "PySparkRuntimeError",
        "[RESULT_COLUMN_SCHEMA_MISMATCH] .*Expected: 2 Actual: 1",
    ),
    "R5 a text for a number": ([RIGHT.assign(a="zz")], "PySparkValueError", "Failed to convert .*'a' .*'int64'"),
    "R5 a fraction for a number": ([RIGHT.assign(a=1.5)], "PySparkValueError", "Failed to convert .*'a' .*'int64'"),
    "R5 a number for a text": ([RIGHT.assign(b=7)], "PySparkTypeError", "Cannot convert .*'b' .*'string'"),
}

# By item: what a function may return, and the rows that come of it for one key.
GOOD: dict[str, tuple[Any, list[tuple[Any, ...]]]] = {
    "R2 a tuple": ((RIGHT, RIGHT), [(1, "x"), (1, "x")]),
    "R4 an empty list": ([], []),
    "R4 an empty frame without columns": ([pd.DataFrame(), RIGHT], [(1, "x")]),
    "R4 a frame without rows": ([RIGHT[:0], RIGHT], [(1, "x")]),
    "R5 columns in another order": ([RIGHT[["b", "a"]]], [(1, "x")]),
    "R5 nulls": ([pd.DataFrame({"a": pd.array([1, None], "Int64"), "b": [None, "y"]})], [(1, None), (None, "y")]),
    "R5 another index": ([pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}, index=[7, 7])], [(1, "x"), (2, "y")]),
    "R5 large numbers": ([RIGHT.assign(a=2**62 + 1)], [(2**62 + 1, "x")]),
}


class Returning:
    """A function that returns for a key what stands under its name."""

    def __init__(self, returned: dict[str, Any]) -> None:
        self.returned = returned

    def __call__(self, key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Any:
        state.update((sum(len(chunk) for chunk in chunks),))
        return self.returned[key[0]]


@engines(FILESYSTEM, MEMORY, ROCKSDB)
def test_what_may_be_returned(engine: Engine, run_on: Open) -> None:
    """R2, R4, R5: one query, a key each."""
    function = Returning({name: returned for name, (returned, _) in GOOD.items()})
    with run_on(engine) as run:
        run.feed([(name, 1, "") for name in GOOD])
        frame = run.apply(run.source(delay=None), ["key"], function, OUTPUT, STATE, "update", "NoTimeout")
        run.run(frame)
        assert sorted(run.batches[0], key=repr) == sorted((r for _, rows in GOOD.values() for r in rows), key=repr)
        assert run.state() == dict.fromkeys(GOOD, ((1,), None))


# Each a column of one frame: its type, what the function returns in it, and the value of the row.
CONVERTED: dict[str, tuple[str, Any, Any]] = {
    "int as decimal": ("decimal(10,2)", pd.Series([5]), Decimal("5.00")),
    "int as date": ("date", pd.Series([5]), dt.date(1970, 1, 6)),
    "int as timestamp": ("timestamp_ntz", pd.Series([5]), dt.datetime(1970, 1, 1, 0, 0, 0, 5)),  # noqa: DTZ001
    "datetime as bigint": ("bigint", pd.Series([dt.datetime(2024, 1, 1)], dtype=object), 1_704_067_200_000_000),  # noqa: DTZ001
    "text as bigint": ("bigint", pd.Series(["5"]), 5),
    "float as bigint": ("bigint", pd.Series([2.0], dtype=object), 2),
    "NaN as text": ("string", pd.Series([float("nan")]), None),
    "NaN as date": ("date", pd.Series([float("nan")]), None),
    "NaN as timestamp": ("timestamp", pd.Series([float("nan")]), None),
    "NaT as text": ("string", pd.Series([pd.NaT]), None),
    "NaT as bigint": ("bigint", pd.Series([pd.NaT]), None),
    "NaT as interval": ("interval day to second", pd.Series([pd.NaT]), None),
    "NA as bigint": ("bigint", pd.Series([None], dtype="Int64"), None),
    "naive object": ("timestamp", pd.Series([dt.datetime(2024, 1, 1)], dtype=object), dt.datetime(2024, 1, 1)),  # noqa: DTZ001
    "category": ("string", pd.Series(["x"], dtype="category"), "x"),
    "tuple as struct": ("struct<a:long,b:string>", pd.Series([(1, "x")]), (1, "x")),
    "list with null": ("array<double>", pd.Series([[1.5, None]]), [1.5, None]),
    "dict as map": ("map<string,long>", pd.Series([{"a": 1}]), {"a": 1}),
}


@pytest.mark.since("4.1")
@engines(MEMORY)
def test_conversions(engine: Engine, run_on: Open) -> None:
    """R5: a frame with columns of many kinds. All pairs of type and kind: `tests/fuzz/test_conversions.py`."""
    frame = pd.DataFrame({f"c{at}": values for at, (_, values, _) in enumerate(CONVERTED.values())})
    output = ", ".join(f"c{at} {data_type}" for at, (data_type, _, _) in enumerate(CONVERTED.values()))
    with run_on(engine) as run:
        run.feed([("key", 1, "")])
        arguments = (Returning({"key": [frame]}), output, STATE, "update", "NoTimeout")
        run.run(run.apply(run.source(delay=None), ["key"], *arguments))
    [[row]] = run.batches
    assert dict(zip(CONVERTED, row, strict=True)) == {what: value for what, (_, _, value) in CONVERTED.items()}


# Each takes a query that starts and fails.
QUICK = cases(list(WRONG), quick=4)
# Spark 4.0 makes a whole number of a fraction.
REFUSED_SINCE_41 = ("R5 a fraction for a number",)
MISTAKES = [
    pytest.param(
        engine,
        item,
        id=f"{item}-{engine.name}",
        marks=[
            *([] if engine is SPARK or item in QUICK else [pytest.mark.all]),
            *([pytest.mark.since("4.1")] if item in REFUSED_SINCE_41 else []),
        ],
    )
    for item in WRONG
    for engine in (SPARK, MEMORY)
]


@pytest.mark.parametrize(("engine", "item"), MISTAKES)
def test_what_may_not_be_returned(engine: Engine, item: str, run_on: Open) -> None:
    """R1 to R5: Spark's class, condition and words."""
    returned, error, words = WRONG[item]
    with run_on(engine) as run:
        run.feed([(item, 1, "")])
        arguments = (Returning({item: returned}), OUTPUT, STATE, "update", "NoTimeout")
        cause, message = cause_of(run.failure(run.apply(run.source(delay=None), ["key"], *arguments)))
    assert cause == error
    condition, _, text = words.rpartition("] ")
    assert message.startswith(condition)
    assert re.search(text, message)


@engines(MEMORY)
def test_labels(engine: Engine, run_on: Open) -> None:
    """R5: numbers for labels mean positions. Spark says so too, but its output is nulls; that of ours is not."""
    frame = pd.DataFrame([[1, "x"]])
    with run_on(engine) as run:
        run.feed([("by position", 1, "")])
        arguments = (Returning({"by position": [frame]}), OUTPUT, STATE, "update", "NoTimeout")
        run.run(run.apply(run.source(delay=None), ["key"], *arguments))
        assert run.batches == [[(None, None) if engine is SPARK else (1, "x")]]


def test_wrong_labels(run_on: Open) -> None:
    """R5: names that are not those of the output are an error as in `applyInPandas`; Spark returns nulls here."""
    with run_on(MEMORY) as run:
        run.feed([("wrong", 1, "")])
        arguments = (Returning({"wrong": [RIGHT.rename(columns=str.upper)]}), OUTPUT, STATE, "update", "NoTimeout")
        cause, message = cause_of(run.failure(run.apply(run.source(delay=None), ["key"], *arguments)))
    assert (cause, message.split("]")[0]) == ("PySparkRuntimeError", "[RESULT_COLUMN_NAMES_MISMATCH")
