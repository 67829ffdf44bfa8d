"""Input: rows as a processor gets them, by Row and in frames."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from holdfast.spark_integration.spark_versions import makes_frames_anew
from tests.spark.processors.probes.probe import attempt
from tests.spark.processors.showing import SHOWN, Calling, Showing, of
from tests.spark.processors.test_keys import NEW_YORK, ONE_PARTITION
from tests.spark.processors.ways import Run, Way, by_way, ways

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow(2)]

_AT = dt.datetime(2026, 1, 2, 8, 4, 5, 6, tzinfo=dt.UTC)
_STRUCT = pa.struct([("x", pa.int32()), ("at", pa.timestamp("us", "UTC"))])
_TYPED = pa.table(
    {
        "k": pa.array(["k"]),
        "i": pa.array([1], pa.int32()),
        "none": pa.array([None], pa.int64()),
        "dec": pa.array([Decimal("1.50")], pa.decimal128(10, 2)),
        "raw": pa.array([b"a"], pa.binary()),
        "day": pa.array([dt.date(2026, 1, 2)], pa.date32()),
        "ts": pa.array([_AT], pa.timestamp("us", "UTC")),
        "ntz": pa.array([_AT.replace(tzinfo=None)], pa.timestamp("us")),
        "st": pa.array([{"x": 1, "at": _AT}], _STRUCT),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())),
        "array": pa.array([[1, 2]], pa.list_(pa.int32())),
    }
)
_TYPES = (
    "k string, i int, none long, dec decimal(10,2), raw binary, day date, ts timestamp, ntz timestamp_ntz, "
    "st struct<x:int,at:timestamp>, map map<string,int>, array array<int>"
)


@by_way(ways(0, api="row"))
def test_i5_rows_of_each_type(way: Way, run: Run) -> None:
    """I5, Q13: a struct is a dict, a map a list of pairs; a timestamp is aware, in the session's zone."""
    shown = run(way, _TYPED, _TYPES, ["k"], Showing("row"), SHOWN, conf=NEW_YORK)
    at = "datetime.datetime(2026, 1, 2, {}, 4, 5, 6{})"
    aware = at.format(3, ", tzinfo=zoneinfo.ZoneInfo(key='America/New_York')")
    [row] = of(shown, "rows")
    assert row == (
        "Row(k='k', i=1, none=None, dec=Decimal('1.50'), raw=b'a', day=datetime.date(2026, 1, 2), "
        f"ts={aware}, ntz={at.format(8, '')}, st={{'x': 1, 'at': {aware}}}, map=[('a', 1)], array=[1, 2])"
    )


@by_way(ways(1, api="pandas"))
def test_i4_frames_of_each_type(way: Way, run: Run) -> None:
    """I4: timestamps are naive, at the session's wall clock; a struct and a map are dicts, an array is numpy's."""
    shown = run(way, _TYPED, _TYPES, ["k"], Showing("pandas"), SHOWN, conf=NEW_YORK)
    columns = {
        "k": ("object", ["k"]),
        "i": ("int64" if makes_frames_anew() else "int32", [1]),
        "none": ("float64", [float("nan")]),
        "dec": ("object", [Decimal("1.50")]),
        "raw": ("object", [b"a"]),
        "day": ("object", [dt.date(2026, 1, 2)]),
    }
    [frame] = of(shown, "rows")
    text, _, rest = frame.partition(", 'ts': ")
    assert text == f"0..1 {columns}"[:-1]
    assert rest.startswith("('datetime64[ns]', [Timestamp('2026-01-02 03:04:05.000006')]), 'ntz': ('datetime64[ns]', ")
    assert "'map': ('object', [{'a': 1}]), 'array': ('object', [[1, 2]])" in rest
    assert "'st': ('object', [{'x': 1, 'at': " in rest


@by_way(ways(2, api="pandas"))
def test_i1_frames_have_limited_rows(way: Way, run: Run) -> None:
    """I1: as many as Spark's setting says; the index begins at 0 in each."""
    table = pa.table({"k": ["a"] * 7, "v": pa.array(range(7), pa.int64())})
    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "3"}
    shown = run(way, table, "k string, v long", ["k"], Showing("pandas"), SHOWN, conf=conf)
    assert [text.split(" ")[0] for text in of(shown, "rows")] == ["0..3", "0..3", "0..1"]
    assert of(shown, "key") == ["('a',)"], "L8: one call"


@by_way(ways(3, api="row"))
def test_l8_one_call_has_all_rows(way: Way, run: Run) -> None:
    """L8: through one iterator, however many Arrow batches that takes."""
    table = pa.table({"k": ["a", "b"] * 7, "v": pa.array(range(14), pa.int64())})
    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "3"}
    shown = run(way, table, "k string, v long", ["k"], Showing("row"), SHOWN, conf=conf)
    assert sorted(of(shown, "key")) == ["('a',)", "('b',)"]
    assert sorted(of(shown, "rows")) == sorted(f"Row(k='{'ab'[v % 2]}', v={v})" for v in range(14))


@by_way(ways(4, api="pandas"))
def test_i2_types_of_columns_go_by_the_keys_own_rows(way: Way, run: Run) -> None:
    """I2, Q11: on Spark a null of another key makes floats of integers."""
    table = pa.table({"k": ["a", "b"], "v": pa.array([1, None], pa.int64())})
    shown = run(way, table, "k string, v long", ["k"], Showing("pandas"), SHOWN, conf=ONE_PARTITION)
    of_a, of_b = of(shown, "rows")
    assert ("'v': ('float64', [1.0])" if way.is_spark else "'v': ('int64', [1])") in of_a
    assert "'v': ('float64', [nan])" in of_b


@by_way(ways(5, api="pandas"))
def test_i3_columns_have_their_own_names(way: Way, run: Run) -> None:
    """I3, Q10: on Spark names that are not Python's are numbers."""
    table = pa.table({"k": ["a"], "a b": pa.array([1], pa.int64()), "class": pa.array([2], pa.int64())})
    shown = run(way, table, "k string, `a b` long, `class` long", ["k"], Showing("pandas"), SHOWN)
    names = ("_1", "_2") if way.is_spark else ("a b", "class")
    assert of(shown, "rows") == [
        f"0..1 {{'k': ('object', ['a']), '{names[0]}': ('int64', [1]), '{names[1]}': ('int64', [2])}}"
    ]


@by_way(ways(6, api="row"))
def test_i5_rows_have_the_columns_names(way: Way, run: Run) -> None:
    """I5: whatever they are."""
    table = pa.table({"k": ["a"], "a b": pa.array([1], pa.int64()), "class": pa.array([2], pa.int64())})
    shown = run(way, table, "k string, `a b` long, `class` long", ["k"], Showing("row"), SHOWN)
    assert of(shown, "rows") == ["Row(k='a', a b=1, class=2)"]


def _takes_one(key: tuple[Any, ...], rows: Any, processor: Calling) -> Any:
    next(iter(rows))
    processor.value.update((1,))
    return [processor.emit(key[0])]


@by_way(ways(7))
def test_l9_rows_need_not_be_taken(way: Way, run: Run) -> None:
    """L9, L10: what is left is skipped; a list is as good as a generator."""
    table = pa.table({"k": ["a", "b", "c"] * 50, "v": pa.array(range(150), pa.int64())})
    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "7"} | ONE_PARTITION
    shown = run(way, table, "k string, v long", ["k"], Calling(way.api, _takes_one), SHOWN, conf=conf)
    assert shown == [("a", ""), ("b", ""), ("c", "")]


def _goes_on(key: tuple[Any, ...], rows: Any, processor: Calling) -> Any:
    """Append to a list before and after the output, and go on with the iterator of the key before."""
    n = ord(key[0])
    processor.items.appendList([(n,), (n + 1,)])
    yield processor.emit(key[0], list(processor.items.get()))
    processor.items.appendValue((n + 2,))
    left = attempt(list, processor.kept.pop()) if processor.kept else "nothing open"
    yield processor.emit(key[0], left)
    elements = iter(processor.items.get())
    next(elements)
    processor.kept.append(elements)


@by_way(ways(8))
def test_s6_an_iterator_belongs_to_its_key(way: Way, run: Run) -> None:
    """S6, Q6: on Spark, after what one message brought, it goes on with the list of the next key.

    L9: calls after output are those of its key.
    """
    table = pa.table({"k": ["a", "m"]})
    conf = {"spark.sql.execution.arrow.transformWithStateInPySpark.maxStateRecordsPerBatch": "2"} | ONE_PARTITION
    shown = run(way, table, "k string", ["k"], Calling(way.api, _goes_on), SHOWN, conf=conf)
    assert shown[0] == ("a", "[(97,), (98,)]")
    assert shown[2] == ("m", "[(109,), (110,)]")
    if way.is_spark:
        assert shown[3] == ("m", "[(98,), (109,), (110,), (111,)]")
    else:
        assert "109" not in shown[3][1]
