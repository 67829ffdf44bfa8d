"""Output: what a processor may return, and what it may not."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row

from tests.spark.parity.engines import cause_of
from tests.spark.processors.showing import Calling
from tests.spark.processors.test_keys import NEW_YORK, ONE_PARTITION
from tests.spark.processors.ways import Run, Way, by_way, ways
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow(2)]

OUTPUT = "a long, b string"
_X = pd.DataFrame({"a": [1], "b": ["x"]})
_AT = dt.datetime(2026, 1, 2, 3, 4, 5)  # noqa: DTZ001  naive ones are the point

# By item: what a processor returns, and the rows that come of it.
GOOD: dict[str, dict[str, tuple[Callable[[], Any], list[tuple[Any, ...]]]]] = {
    "row": {
        "L10 a generator": (lambda: (Row(a=n, b="x") for n in range(2)), [(0, "x"), (1, "x")]),
        "L10 a list": (lambda: [Row(a=1, b="x")], [(1, "x")]),
        "L10 a tuple": (lambda: (Row(a=1, b="x"),), [(1, "x")]),
        "L10 nothing in an iterator": (lambda: iter(()), []),
        "R1 fields in another order": (lambda: [Row(b="x", a=1)], [(1, "x")]),
        "R1 nulls": (lambda: [Row(a=None, b=None)], [(None, None)]),
        "R1 an extra field": (lambda: [Row(a=1, c=9, b="x")], [(1, "x")]),
    },
    "pandas": {
        "L10 a generator": (lambda: (_X for _ in range(2)), [(1, "x"), (1, "x")]),
        "L10 a list": (lambda: [_X, _X], [(1, "x"), (1, "x")]),
        "L10 nothing in an iterator": (lambda: iter(()), []),
        "R4 columns in another order": (lambda: [_X[["b", "a"]]], [(1, "x")]),
        "R4 an extra column": (lambda: [_X.assign(c=9)], [(1, "x")]),
        "R4 columns without names": (lambda: [pd.DataFrame([(1, "x")])], [(1, "x")]),
        "R4 no columns": (lambda: [pd.DataFrame(), _X], [(1, "x")]),
        "R4 no rows": (lambda: [_X[:0], _X], [(1, "x")]),
        "R4 another index": (lambda: [_X.set_index(pd.Index([7]))], [(1, "x")]),
        "R4 nulls": (lambda: [_X.assign(b=None)], [(1, None)]),
    },
}

# By item: what a processor must not return; the error on Spark, and ours if it has another class: class and words.
_Wrong = tuple[Callable[[], Any], tuple[str, str], tuple[str, str]]
_NO_ROW = ("AttributeError", "asDict")
_INVALID = ("PySparkValueError", "Invalid return type")
WRONG: dict[str, dict[str, _Wrong]] = {
    "row": {
        "L10 nothing": (lambda: None, ("TypeError", "iterable"), ("TypeError", "iterable")),
        "R1 a tuple": (lambda: [(1, "x")], _NO_ROW, _NO_ROW),
        "R1 a dict": (lambda: [{"a": 1, "b": "x"}], _NO_ROW, _NO_ROW),
        "R1 a row without names": (
            lambda: [Row(1, "x")],
            ("PySparkTypeError", "CANNOT_CONVERT_TYPE"),
            ("PySparkTypeError", "CANNOT_CONVERT_TYPE"),
        ),
        "R2 a number for a text": (
            lambda: [Row(a=1, b=7)],
            ("ArrowTypeError", "Expected bytes"),
            ("ArrowTypeError", "Expected bytes"),
        ),
    },
    "pandas": {
        "L10 nothing": (lambda: None, ("TypeError", "iterable"), ("TypeError", "iterable")),
        "R5 a series": (lambda: [_X["a"]], _INVALID, _INVALID),
        "R5 a frame": (lambda: _X, _INVALID, _INVALID),
        "R4 a missing column": (
            lambda: [_X[["a"]]],
            ("KeyError", "['b'] not in index"),
            ("SchemaMismatchError", "missing=['b']"),
        ),
    },
}


def returning(by_key: dict[str, Callable[[], Any]]) -> Callable[..., Any]:
    """Return a function that returns for a key what stands under its name."""
    return lambda key, rows, processor: by_key[key[0]]()


@by_way(ways(0))
def test_what_a_processor_may_return(way: Way, run: Run) -> None:
    """R1, R4, L10: rows and frames go by name."""
    good = GOOD[way.api]
    table = pa.table({"k": list(good)})
    processor = Calling(way.api, returning({name: make for name, (make, _) in good.items()}))
    found = run(way, table, "k string", ["k"], processor, OUTPUT)
    assert sorted(found, key=repr) == sorted((row for _, rows in good.values() for row in rows), key=repr)


NAMES = [(api, name) for api in WRONG for name in WRONG[api]]


def refused(run: Run, way: Way, name: str) -> tuple[str, str]:
    """Return class and message of the error in the worker."""
    make, *_ = WRONG[way.api][name]
    table = pa.table({"k": ["a"]})
    with pytest.raises(Exception, match="Error") as error:
        run(way, table, "k string", ["k"], Calling(way.api, returning({"a": make})), OUTPUT)
    return cause_of(error.value)


@pytest.mark.all
@pytest.mark.parametrize(("api", "name"), NAMES)
def test_what_spark_refuses(api: Any, name: str, run: Run) -> None:
    """R1, R2, R4, R5, L10: so that we learn when it changes."""
    _, (class_, words), _ = WRONG[api][name]
    found, text = refused(run, ways(api=api)[0], name)
    assert (found, words in text) == (class_, True), text


@pytest.mark.parametrize(("api", "name"), cases(NAMES, quick=4))
def test_what_a_processor_must_not_return(api: Any, name: str, run: Run) -> None:
    """R1, R2, R4, R5, L10: with Spark's classes; a column that is missing has a clearer one."""
    *_, (class_, words) = WRONG[api][name]
    found, text = refused(run, ways(api=api, batch_only=True)[-1], name)
    assert (found, words in text) == (class_, True), text


@by_way(ways(2, api="row"))
def test_r1_a_missing_field(way: Way, run: Run) -> None:
    """R1, Q14: null on Spark, an error of ours."""
    table = pa.table({"k": ["a"]})
    arguments = (way, table, "k string", ["k"], Calling("row", returning({"a": lambda: [Row(a=1)]})), OUTPUT)
    if way.is_spark:
        assert run(*arguments) == [(1, None)]
    else:
        with pytest.raises(Exception, match=r"missing=\['b'\]"):
            run(*arguments)


_NESTED = "k string, st struct<x:int,y:string>, array array<int>, map map<string,int>, deep array<struct<x:int>>"


@by_way(ways(4))
def test_r1_output_of_nested_types(way: Way, run: Run) -> None:
    """R1, R4: structs, arrays and maps, with nulls in them; a struct may be a dict, by Row also a row."""

    def nested(key: Any, rows: Any, processor: Calling) -> Any:
        row = {"k": key[0], "st": {"x": 1, "y": None}, "array": [1, None], "map": {"a": 1}, "deep": [{"x": 2}, None]}
        if processor.api == "row":
            return [Row(**row), Row(**(row | {"st": Row(x=1, y=None), "deep": [Row(x=2), None]}))]
        return [pd.DataFrame({name: [value] for name, value in row.items()})] * 2

    processor = Calling(way.api, nested)
    found = run(way, pa.table({"k": ["a"]}), "k string", ["k"], processor, _NESTED)
    assert found == [("a", Row(x=1, y=None), [1, None], {"a": 1}, [Row(x=2), None])] * 2


@by_way(ways(1, api="row"))
def test_r7_nan_by_row(way: Way, run: Run) -> None:
    """R7: NaN is a number, not null, at any depth; and maps have keys of any type."""

    def odd(key: Any, rows: Any, processor: Calling) -> Any:
        nan = math.nan
        return [
            Row(d=nan, f=nan, a=[nan, None], s={"x": nan}, m={(1.5,): nan}),
            Row(d=None, f=1.5, a=None, s={"x": None}, m=None),
        ]

    schema = "d double, f float, a array<double>, s struct<x:float>, m map<struct<x:double>,double>"
    found = run(way, pa.table({"k": ["a"]}), "k string", ["k"], Calling("row", odd), schema)
    assert sorted(map(repr, found)) == [
        "(None, 1.5, None, Row(x=None), None)",
        "(nan, nan, [nan, None], Row(x=nan), {Row(x=1.5): nan})",
    ]


@by_way(ways(2, api="pandas"))
def test_r8_a_frame_that_is_yielded_again(way: Way, run: Run) -> None:
    """R8: it is what it was when it was yielded, and so is a list in it."""

    def growing(key: Any, rows: Any, processor: Calling) -> Any:
        seen: list[int] = []
        frame = pd.DataFrame({"n": [0], "seen": [seen]})
        for n in range(3):
            frame.iat[0, 0] = n
            seen.append(n)
            yield frame

    table = pa.table({"k": ["a"]})
    found = run(way, table, "k string", ["k"], Calling("pandas", growing), "n int, seen array<int>")
    assert sorted(found) == [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])]


@by_way(ways(5, api="pandas"))
@pytest.mark.parametrize("coerced", [True, False])
def test_r6_integers_for_a_decimal(way: Way, coerced: bool, run: Run) -> None:
    """R6: on Spark if a setting says so; ours takes them in any case, as they fit or are refused."""

    def integers(key: Any, rows: Any, processor: Calling) -> Any:
        return [pd.DataFrame({"d": [n]}) for n in (7, -8)]

    table = pa.table({"k": ["a"]})
    conf = {"spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled": str(coerced).lower()}
    arguments = (way, table, "k string", ["k"], Calling("pandas", integers), "d decimal(10,2)")
    if coerced or not way.is_spark:
        assert run(*arguments, conf=conf) == [(Decimal("7.00"),), (Decimal("-8.00"),)]
    else:
        with pytest.raises(Exception, match="decimal128"):
            run(*arguments, conf=conf)


@by_way(ways(3))
def test_r2_naive_datetimes(way: Way, run: Run) -> None:
    """R2, Q12: by Row they are UTC; by pandas they are in the session's zone. Aware ones are instants."""
    aware = _AT.replace(tzinfo=dt.UTC)

    def both(key: Any, rows: Any, processor: Calling) -> Any:
        times = (_AT, aware)
        return [Row(at=at) if processor.api == "row" else pd.DataFrame({"at": [at]}) for at in times]

    table = pa.table({"k": ["a"]})
    conf = NEW_YORK | ONE_PARTITION
    found = run(way, table, "k string", ["k"], Calling(way.api, both), "at timestamp", conf=conf)
    shift = dt.timedelta(hours=0 if way.api == "row" else 5)
    # collect() shows instants in the zone of this process.
    local = [instant.astimezone().replace(tzinfo=None) for instant in (aware + shift, aware)]
    assert [at for (at,) in found] == local
