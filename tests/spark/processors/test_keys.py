"""Keys: what a processor is given as one, which rows it stands for, and in which order keys are called."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from holdfast.spark_integration.spark_versions import makes_frames_anew
from tests.spark.processors.showing import SHOWN, Calling, Showing, of
from tests.spark.processors.ways import Run, Way, by_way, ways

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow(2)]

ONE_PARTITION = {"spark.sql.shuffle.partitions": "1"}
NEW_YORK = {"spark.sql.session.timeZone": "America/New_York"}
_AT = dt.datetime(2026, 1, 2, 8, 4, 5, tzinfo=dt.UTC)
_TYPED = pa.table(
    {
        "i": pa.array([1], pa.int32()),
        "f": pa.array([1.5], pa.float64()),
        "s": pa.array(["x"], pa.string()),
        "flag": pa.array([True], pa.bool_()),
        "day": pa.array([dt.date(2026, 1, 2)], pa.date32()),
        "dec": pa.array([Decimal("1.50")], pa.decimal128(10, 2)),
        "raw": pa.array([b"\x00a"], pa.binary()),
        "ts": pa.array([_AT], pa.timestamp("us", "UTC")),
        "none": pa.array([None], pa.string()),
    }
)
_TYPES = "i int, f double, s string, flag boolean, day date, dec decimal(10,2), raw binary, ts timestamp, none string"
_REST = "datetime.date(2026, 1, 2), Decimal('1.50'), b'\\x00a'"
_PLAIN = f"1, 1.5, 'x', True, {_REST}"
_BY_NUMPY = f"np.int32(1), np.float64(1.5), 'x', np.True_, {_REST}"


def keys_of(shown: Iterable[tuple[str, str]], what: str) -> list[str]:
    """Return what was shown of keys, in Python's values; by pandas on Spark 4.0 they are NumPy's."""
    texts = of(shown, what)
    return texts if makes_frames_anew() else [re.sub(r"np\.\w+\((.*?)\)", r"\1", text) for text in texts]


@pytest.mark.all
@by_way(ways(0, api="row"))
def test_k1_keys_of_each_type_by_row(way: Way, run: Run) -> None:
    """K1: Python's values; a timestamp is aware, in the session's zone."""
    names = _TYPED.column_names
    shown = run(way, _TYPED, _TYPES, names, Showing("row"), SHOWN, conf=NEW_YORK)
    zone = "tzinfo=zoneinfo.ZoneInfo(key='America/New_York')"
    assert of(shown, "key") == [f"({_PLAIN}, datetime.datetime(2026, 1, 2, 3, 4, 5, {zone}), None)"]


@by_way(ways(1, api="pandas"))
def test_k1_keys_of_each_type_by_pandas(way: Way, run: Run) -> None:
    """K1: Python's values too, on Spark 4.0 NumPy's; a timestamp is naive, at the session's wall clock."""
    names = _TYPED.column_names
    shown = run(way, _TYPED, _TYPES, names, Showing("pandas"), SHOWN, conf=NEW_YORK)
    plain = _PLAIN if makes_frames_anew() else _BY_NUMPY
    assert of(shown, "key") == [f"({plain}, Timestamp('2026-01-02 03:04:05'), None)"]


@by_way(ways(2, api="row", batch_only=True))
def test_k2_the_key_of_a_timer(way: Way, run: Run) -> None:
    """K2, Q8: a row with names, from what is stored: its timestamp is naive, in the worker's zone."""
    names = _TYPED.column_names
    shown = run(way, _TYPED, _TYPES, names, Showing("row", (0,)), SHOWN, "processingTime", conf=NEW_YORK)
    [timer] = of(shown, "timer")
    ts = "datetime.datetime(2026, 1, 2, 8, 4, 5)"
    plain = "i=1, f=1.5, s='x', flag=True, day=datetime.date(2026, 1, 2), dec=Decimal('1.50')"
    assert timer in {f"0 Row({plain}, raw={raw}, ts={ts}, none=None)" for raw in ("b'\\x00a'", "bytearray(b'\\x00a')")}


@by_way(ways(3, api="pandas", batch_only=True))
def test_k8_the_key_of_a_timer_by_pandas(way: Way, run: Run) -> None:
    """K8, Q29: on Spark the stored key is shifted by the zones' difference."""
    table = pa.table({"ts": pa.array([_AT], pa.timestamp("us", "UTC"))})
    shown = run(way, table, "ts timestamp", ["ts"], Showing("pandas", (0,)), SHOWN, "processingTime", conf=NEW_YORK)
    hour = 3 if way.is_spark else 8
    assert of(shown, "timer") == [f"0 Row(ts=datetime.datetime(2026, 1, 2, {hour}, 4, 5))"]


@by_way(ways(4, api="pandas"))
def test_k8_the_two_instants_of_an_autumn_hour(way: Way, run: Run) -> None:
    """K8, Q29: one wall clock, two keys; on Spark they share one state."""
    hours = [dt.datetime(2026, 11, 1, hour, 30, tzinfo=dt.UTC) for hour in (5, 6)]
    table = pa.table({"ts": pa.array(hours, pa.timestamp("us", "UTC"))})
    conf = NEW_YORK | ONE_PARTITION
    shown = run(way, table, "ts timestamp", ["ts"], Showing("pandas"), SHOWN, conf=conf)
    key = "(Timestamp('2026-11-01 01:30:00'),)"
    if way.is_spark:
        # What is left of the two depends on how they came: one call, or two on one state.
        assert set(of(shown, "key")) == {key}
    else:
        assert of(shown, "state") == [f"{key} 0"] * 2


@by_way(ways(5))
def test_k4_integers_and_null(way: Way, run: Run) -> None:
    """K4, Q1: on Spark, by pandas, all keys of the Arrow batch have the state of the null key, on 4.0 NaN."""
    table = pa.table({"i": pa.array([1, None, 2, 1], pa.int64())})
    shown = run(way, table, "i long", ["i"], Showing(way.api), SHOWN, conf=ONE_PARTITION)
    if way.is_spark and way.api == "pandas":
        assert of(shown, "state") == ["(nan,) 0", "(1.0,) 1", "(2.0,) 2"]
    else:
        null = "None" if way.api == "row" or makes_frames_anew() else "nan"
        assert keys_of(shown, "state") == [f"({null},) 0", "(1,) 0", "(2,) 0"]


@by_way(ways(6))
def test_k5_nan_and_zero(way: Way, run: Run) -> None:
    """K5: NaN is one key and one state, of which Spark makes a call for each row; so are both zeros."""
    table = pa.table({"f": pa.array([math.nan, 0.0, -0.0, math.nan, 1.0], pa.float64())})
    shown = run(way, table, "f double", ["f"], Showing(way.api), SHOWN, conf=ONE_PARTITION)
    calls = ["(nan,) 0", "(nan,) 1"] if way.is_spark else ["(nan,) 0"]
    assert keys_of(shown, "state") == ["(0.0,) 0", "(1.0,) 0", *calls]


@by_way(ways(7))
def test_o2_keys_are_called_in_ascending_order(way: Way, run: Run) -> None:
    """O2: by all grouping columns, null first; K5: a null in a text key is None."""
    keys = [("b", 1), (None, 5), ("a", 2), ("a", -1), ("B", 0), ("", 9), ("ä", 3)]
    table = pa.table({"s": [s for s, _ in keys], "n": pa.array([n for _, n in keys], pa.int64())})
    shown = run(way, table, "s string, n long", ["s", "n"], Showing(way.api), SHOWN, conf=ONE_PARTITION)
    ascending = [(None, 5), ("", 9), ("B", 0), ("a", -1), ("a", 2), ("b", 1), ("ä", 3)]
    assert keys_of(shown, "key") == [repr(key) for key in ascending]


@by_way(ways(8, batch_only=True))
def test_o4_timers_fire_in_order_of_time_over_all_keys(way: Way, run: Run) -> None:
    """O4, O3, O6: after all rows; at one time in an order that nobody promises."""
    table = pa.table({"s": pa.array(["b", "a", "c"])})
    conf = ONE_PARTITION
    shown = run(way, table, "s string", ["s"], Showing(way.api, (-1, -5, 0)), SHOWN, "processingTime", conf=conf)
    assert [what for what, _ in shown] == ["key", "state", "rows"] * 3 + ["timer"] * 9
    timers = [text.split(" ", 1) for text in of(shown, "timer")]
    assert [due for due, _ in timers] == ["-5"] * 3 + ["-1"] * 3 + ["0"] * 3
    for at in (0, 3, 6):
        assert {key for _, key in timers[at : at + 3]} == {"Row(s='a')", "Row(s='b')", "Row(s='c')"}


@by_way(ways(9))
def test_k3_the_grouping_columns_stay_in_the_rows(way: Way, run: Run) -> None:
    """K3: and a key given twice stands twice in the tuple."""
    table = pa.table({"s": ["x"], "n": pa.array([1], pa.int64())})
    shown = run(way, table, "s string, n long", ["n", "s"], Showing(way.api), SHOWN)
    assert keys_of(shown, "key") == ["(1, 'x')"]
    [row] = of(shown, "rows")
    assert row == ("Row(s='x', n=1)" if way.api == "row" else "0..1 {'s': ('object', ['x']), 'n': ('int64', [1])}")


def _numbers(key: tuple[object, ...], rows: Any, processor: Calling) -> Any:
    found = [row.v for row in rows] if processor.api == "row" else [v for frame in rows for v in frame["v"].tolist()]
    yield processor.emit(str(key), sorted(found))


@by_way(ways(10))
def test_k3_keys_that_stand_apart(way: Way, run: Run) -> None:
    """K3, K1: grouping columns need not be neighbours, nor be named in the order of the input's columns."""
    rows = [("x", 1, 7, "p"), ("x", 2, 7, "q"), ("y", 3, 7, "q"), ("x", 4, 8, "q")]
    table = pa.table(dict(zip(("a", "v", "b", "c"), map(list, zip(*rows, strict=True)), strict=True)))
    processor = Calling(way.api, _numbers)
    shown = run(way, table, "a string, v long, b long, c string", ["c", "a"], processor, SHOWN, conf=ONE_PARTITION)
    assert shown == [("('p', 'x')", "[1]"), ("('q', 'x')", "[2, 4]"), ("('q', 'y')", "[3]")]
