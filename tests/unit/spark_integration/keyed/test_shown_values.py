"""Rows and values as a function is shown them: as Spark and Arrow make them, and where Spark's own conversion fails."""

from __future__ import annotations

import copy
import datetime as dt
import pickle
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    LongType,
    MapType,
    Row,
    StructField,
    StructType,
    TimestampType,
)

from holdfast.spark_integration.keyed.python_values import RowValues, plain, row_maker, struct_maker, to_python
from tests.faults.elsewhere import finish, run_elsewhere
from tests.tiers import cases
from tests.time_zone import process_in

#: Names that mean something else on a row, on its class or on a tuple, and odd ones.
ODD = ["count", "index", "asDict", "__x", "__fields__", "__dict__", "__class__", "_fields", "mro", "é", "", "a b"]
names = st.one_of(st.sampled_from(["a", "b", "a\0b", *ODD]), st.text(max_size=3))
columns = st.lists(st.tuples(names, st.none() | st.integers() | st.text(max_size=2)), max_size=6)


def outcome(call: Callable[[], Any]) -> Any:
    """Return the text of what a call returns, or its error."""
    try:
        found = call()
    except Exception as exc:  # noqa: BLE001  any, which must be the other one's
        return type(exc), str(exc)
    return "a method" if callable(found) and not isinstance(found, tuple) else repr(found)


def done(use: Callable[[Any], Any], row: Row) -> list[Any]:
    """Return what comes of a use of a row, and how the row is afterwards."""
    after = (repr, tuple, Row.__reduce__, lambda row: row.__fields__)
    return [outcome(partial(look, row)) for look in (use, *after)]


def uses_of(name: str) -> dict[str, Callable[[Row], Any]]:
    """Return what a function may do with a row and a name."""
    return {
        "attribute": lambda row: getattr(row, name),
        "item": lambda row: row[name],
        "contains": lambda row: (name in row, 1 in row, None in row),
        "set": lambda row: setattr(row, name, 1),
        "delete": lambda row: delattr(row, name),
        "rename": lambda row: (setattr(row, "__fields__", [name, "a"]), *(getattr(row, n, None) for n in "ab")),
        "forget": lambda row: (delattr(row, "__fields__"), row.a),
        "dict": lambda row: row.asDict(recursive=True),
        "tuple": lambda row: (tuple(row), [*row], row[1:], row[:1], len(row), hash(row), row * 2),
        "number": lambda row: row[2],
        "compare": lambda row: (row == tuple(row), row < (*row, 1), row != [*row]),
        "call": lambda row: row(1),
        "pickle": pickle.dumps,
        "unpickle": lambda row: (type(pickle.loads(pickle.dumps(row))), pickle.loads(pickle.dumps(row))),
        "copy": lambda row: (type(copy.copy(row)), copy.copy(row), copy.deepcopy(row)),
        "vars": vars,
        "dir": dir,
        "class": lambda row: (row.__class__, isinstance(row, Row), row.__doc__),
        "its name": lambda row: (type(row).__name__, type(row).__module__),
        "text": lambda row: (str(row), f"{row}", row.__format__("")),
        "slots": lambda row: row.__slots__,
        "index": lambda row: (row.index(row[0]), row.count(row[0])),
    }


@given(columns, names)
def test_a_row_is_sparks_in_all_that_a_function_sees(given_columns: list[tuple[str, Any]], name: str) -> None:
    """Columns may have any names, several times, and names of Spark's and of Python's own; errors are the same."""
    fields, values = [field for field, _ in given_columns], tuple(value for _, value in given_columns)
    for sought in {name, *fields}:
        for what, use in uses_of(sought).items():
            assert done(use, row_maker(*fields)(values)) == done(use, Row(*fields)(*values)), what
            # One in a state: Spark makes it of its schema's names, a list.
            inner = StructType([StructField(field, LongType()) for field in fields]).fromInternal(values)
            assert done(use, struct_maker(*fields)(values)) == done(use, inner), what


def test_a_row_that_is_used_again_and_again_is_still_sparks() -> None:
    """What makes it one of Spark's, as a look at its attributes does, leaves it as it was."""
    row, other = row_maker("a", "b")([1, [2]]), Row("a", "b")(1, [2])
    for what in ["vars", "attribute", "rename", "attribute", "dict", "delete", "forget", "attribute", "copy", "set"]:
        for name in ("a", "b", "c"):
            assert done(uses_of(name)[what], row) == done(uses_of(name)[what], other), (what, name)
    assert (row_maker("a", "b")([1, 2]), row_maker("a", "b")([1, 2]).a) == (Row(a=1, b=2), 1), "others are not renamed"


def require_row(data: bytes) -> None:
    row = pickle.loads(data)
    assert (type(row), row, row.a, row.asDict()) == (Row, Row(a=1, b=None), 1, {"a": 1, "b": None})


def test_a_row_goes_to_another_process() -> None:
    finish(run_elsewhere(require_row, pickle.dumps(row_maker("a", "b")((1, None)))))


# Changes of clocks forwards and backwards, of half an hour and of a day; local mean time; both ends of the calendar.
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "Asia/Kolkata"]
ZONES += ["Africa/Monrovia"]
FIXED = ["+02:00", "-11:30", "Z"]
_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
_AWKWARD = [_FIRST, _LAST, 0, -1, -(1 << 63), (1 << 63) - 1, _FIRST - 1, _LAST + 1]
_CHANGES = [1_698_541_200, 1_679_792_400, 1_699_164_000, 1_712_415_600, 1_325_239_200, -2_422_054_408, -1_604_359_012]
moments = st.one_of(
    *(st.sampled_from(_AWKWARD), st.integers(_FIRST, _LAST)),
    st.integers(-2_300_000_000_000_000, 2_500_000_000_000_000),
    st.builds(lambda at, by: at * 10**6 + by, st.sampled_from(_CHANGES), st.integers(-7_200_000_000, 7_200_000_000)),
)


def same(found: Callable[[], list[Any]], wanted: Callable[[], list[Any]]) -> None:
    """Check that two conversions return identical values, or raise the same error."""
    both = [outcome(lambda convert=convert: [exact(v) for v in convert()]) for convert in (found, wanted)]
    assert both[0] == both[1]


def exact(value: Any) -> tuple[Any, ...]:
    """Return all that tells two times, days or numbers apart."""
    return type(value), repr(value), getattr(value, "fold", 0), getattr(value, "tzinfo", None)


@given(st.lists(st.none() | moments, max_size=12), st.sampled_from([None, *ZONES, *FIXED]), st.integers(0, 3))
def test_times_of_rows_are_those_of_arrow(numbers: list[int | None], zone: str | None, start: int) -> None:
    """The same objects to the last bit: zone, fold, error beyond Python's calendar."""
    for kind in (pa.timestamp("us", zone), pa.duration("us"), pa.timestamp("ms", zone)):
        column = pa.array(numbers, pa.int64()).view(kind).slice(min(start, len(numbers)))
        same(lambda column=column: plain(column), column.to_pylist)


@given(st.lists(st.none() | st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-719_162, 2_932_896), max_size=12))
def test_days_of_rows_are_those_of_arrow(numbers: list[int | None]) -> None:
    column = pa.array(numbers, pa.int32()).view(pa.date32())
    same(lambda: plain(column), column.to_pylist)


@given(st.sampled_from([(1, 0), (9, 9), (18, 2), (38, 0), (38, 18), (38, 38)]), st.data())
def test_decimals_of_rows_are_those_of_arrow(size: tuple[int, int], data: st.DataObject) -> None:
    """With the same exponent, and so the same text."""
    precision, scale = size
    digits = st.integers(-(10**precision) + 1, 10**precision - 1) | st.integers(-99, 99).map(
        lambda n: n % 10**precision
    )
    numbers = data.draw(st.lists(st.none() | digits, max_size=12))
    given_values = [None if n is None else Decimal((int(n < 0), tuple(map(int, str(abs(n)))), -scale)) for n in numbers]
    column = pa.array(given_values, pa.decimal128(precision, scale))
    same(lambda: plain(column), column.to_pylist)


@given(st.lists(st.none() | moments, min_size=1, max_size=4), st.sampled_from(ZONES), st.integers(1, 12))
def test_times_of_state_are_those_of_spark(numbers: list[int | None], zone: str, repeats: int) -> None:
    """In the process's zone, in which one number is taken for all times of an hour in which clocks stay."""
    near = [
        n if n is None else min(max(n + 60_000_000 * i, -(1 << 63)), (1 << 63) - 1)
        for n in numbers
        for i in range(repeats)
    ]
    column = pa.array(near, pa.int64()).view(pa.timestamp("us", "UTC"))
    with process_in(zone):
        if all(n is None or n > _FIRST + 172_800_000_000 for n in near):
            same(lambda: to_python(column, TimestampType()), lambda: [TimestampType().fromInternal(n) for n in near])


@pytest.mark.slow(1)
@pytest.mark.parametrize("zone", cases(ZONES, quick=3))
def test_every_change_of_clocks_of_a_zone_is_seen(zone: str) -> None:
    """From 1880 to 2040: the day around each, an hour of which is taken together where clocks stay."""

    def shown(micros: int) -> Any:
        return TimestampType().fromInternal(micros)

    day = 86_400_000_000
    with process_in(zone):
        days = range(-32_872 * day, 25_567 * day, day)
        ahead = [(shown(at) - shown(0)) // dt.timedelta(microseconds=1) - at for at in days]
        changed = [at for at, before, after in zip(days, ahead, ahead[1:], strict=False) if before != after]
        assert bool(changed) is (zone != "UTC")
        for at in changed:
            fives = [at + 300_000_000 * five for five in range(25 * 12)]
            column = pa.array(fives, pa.int64()).view(pa.timestamp("us", "UTC"))
            for start in range(0, len(column), 12):
                times = to_python(column.slice(start, 12), TimestampType())
                expected = [shown(n) for n in fives[start : start + 12]]
                assert [(t, t.fold) for t in times] == [(t, t.fold) for t in expected]


def kept(value: Any, data_type: DataType) -> Any:
    """Return a value as it is read after it was put."""
    values = RowValues(StructType().add("v", data_type))
    [(shown,)] = values.to_tuples(values.to_arrow([(value,)]))
    return shown


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_the_first_day_of_the_calendar_is_read(zone: str) -> None:
    """As `datetime.min`, which says "never yet" in many a state; Spark's conversion looks at the day before."""
    first = dt.datetime.min  # noqa: DTZ901  a state's times have no zone
    with process_in(zone):
        for moment in (first, first + dt.timedelta(hours=23, microseconds=7), first + dt.timedelta(days=3)):
            assert kept(moment, TimestampType()) == moment


POINT = StructType().add("x", LongType()).add("tags", ArrayType(BinaryType()))


@pytest.mark.parametrize(
    ("key", "data_type"),
    [
        ((1, 2), ArrayType(LongType())),
        (((1, None), None, ()), ArrayType(ArrayType(LongType()))),
        (Row(x=1, tags=(b"a", b"b")), POINT),
        (b"a", BinaryType()),
    ],
)
def test_maps_by_arrays_are_read(key: Any, data_type: DataType) -> None:
    """Lists cannot be keys of a dict: they are tuples there, at any depth."""
    shown = kept({key: 3}, MapType(data_type, LongType()))
    assert shown == {key: 3}
    assert repr(shown) == repr({key: 3})
