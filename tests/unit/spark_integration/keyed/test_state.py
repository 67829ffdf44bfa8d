"""States of keys: what `GroupState` gives and takes, against Spark's own class and its own conversions."""

from __future__ import annotations

import copy
import datetime as dt
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkRuntimeError, PySparkTypeError, PySparkValueError
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.streaming.state import GroupState

from holdfast.backends.arrow.rows import storage_type
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.spark_integration.keyed import pandas_with_state, python_values
from holdfast.spark_integration.keyed.pandas_with_state import KeyState, KeyStates
from holdfast.spark_integration.keyed.python_values import RowValues, StateValueError
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.testing.ddl import parse_schema
from tests.time_zone import process_in

MICROS = st.integers(-(2**51), 2**52)
WALL_CLOCK = MICROS.map(lambda us: (dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(0, 0, us)).replace(tzinfo=None))
POINT = T.StructType().add("x", T.IntegerType()).add("at", T.TimestampType()).add("name", T.StringType())
PLAIN: list[tuple[T.DataType, st.SearchStrategy[Any]]] = [
    (T.ByteType(), st.integers(-128, 127)),
    (T.ShortType(), st.integers(-(2**15), 2**15 - 1)),
    (T.IntegerType(), st.integers(-(2**31), 2**31 - 1)),
    (T.LongType(), st.integers(-(2**63), 2**63 - 1)),
    (T.FloatType(), st.floats(width=32, allow_nan=False)),
    (T.DoubleType(), st.floats(allow_nan=False)),
    (T.BooleanType(), st.booleans()),
    (T.StringType(), st.text(max_size=3)),
    (T.BinaryType(), st.binary(max_size=3)),
    (T.DateType(), st.dates()),
    (T.TimestampType(), st.one_of(WALL_CLOCK, WALL_CLOCK.map(lambda value: value.replace(tzinfo=dt.UTC)))),
    (T.TimestampNTZType(), WALL_CLOCK),
    (T.DayTimeIntervalType(), st.timedeltas(dt.timedelta(-1000), dt.timedelta(1000))),
    (T.DecimalType(38, 2), st.decimals(-(10**30), 10**30, places=2)),
]
NULLABLE_POINTS = st.one_of(st.none(), st.tuples(st.integers(0, 3), st.one_of(st.none(), WALL_CLOCK), st.text()))
NESTED: list[tuple[T.DataType, st.SearchStrategy[Any]]] = [
    (POINT, NULLABLE_POINTS),
    (T.StructType(), st.just(())),
    (T.StructType().add("p", POINT).add("b", T.BooleanType()), st.tuples(NULLABLE_POINTS, st.booleans())),
    (T.ArrayType(POINT), st.lists(NULLABLE_POINTS, max_size=3)),
    (T.ArrayType(T.ArrayType(T.LongType())), st.lists(st.one_of(st.none(), st.lists(st.integers(0, 9))), max_size=3)),
    (T.MapType(T.StringType(), POINT), st.dictionaries(st.text(max_size=2), NULLABLE_POINTS, max_size=3)),
    (T.MapType(T.DateType(), T.ArrayType(T.StringType())), st.dictionaries(st.dates(), st.lists(st.text(max_size=1)))),
]
EVERY = PLAIN + NESTED


def schema_of(*types: T.DataType, nullable: bool = True) -> T.StructType:
    schema = T.StructType()
    for i, data_type in enumerate(types):
        schema.add(f"c{i}", data_type, nullable)
    return schema


def through_spark(schema: T.StructType, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what `get` gives on Spark after `update`; the JVM row between them holds the internal values."""
    return tuple(schema.fromInternal(pickle.loads(pickle.dumps(schema.toInternal(T.Row(*given))))))


def through_ours(schema: T.StructType, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    values = RowValues(schema)
    batch = values.to_arrow(rows)
    sent = pa.Table.from_batches([batch]).cast(arrow_schema(schema, "the state"))
    assert values.to_tuples(sent) == values.to_tuples(batch)
    return values.to_tuples(batch)


@pytest.fixture(params=["Asia/Tokyo", "America/New_York"])
def process_zone(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set the time zone of the process, which decides over states and not the session's."""
    with process_in(request.param):
        yield request.param


@pytest.mark.parametrize(
    ("data_type", "values"), EVERY, ids=lambda v: v.simpleString() if hasattr(v, "jsonValue") else ""
)
def test_states_come_back_as_from_spark(
    data_type: T.DataType, values: st.SearchStrategy[Any], process_zone: str
) -> None:
    schema = schema_of(data_type, data_type)

    @given(st.lists(st.tuples(values, st.one_of(st.none(), values)), max_size=4))
    def run(rows: list[tuple[Any, ...]]) -> None:
        ours = through_ours(schema, rows)
        sparks = [through_spark(schema, row) for row in rows]
        assert ours == sparks
        assert repr(ours) == repr(sparks)  # Types, too: 1 is True, and a Row is a tuple.

    run()


@pytest.mark.parametrize(
    ("data_type", "value", "kept"),
    [
        (T.StringType(), 1e10, "1.0E10"),
        (T.BooleanType(), pd.NA, None),
        # Spark makes nulls of these without a word, though nothing is lost.
        *((T.DoubleType(), 1, 1.0), (T.LongType(), 3.0, 3), (T.LongType(), True, 1)),
        (T.DecimalType(5, 1), 1, Decimal("1.0")),
    ],
)  # fmt: skip
def test_what_fits_is_kept_as_spark_keeps_it(data_type: T.DataType, value: Any, kept: Any) -> None:
    """Each was run on Spark."""
    assert repr(through_ours(schema_of(data_type), [(value,)])) == repr([(kept,)])


@pytest.mark.parametrize(
    ("data_type", "value"),
    [
        *((T.LongType(), value) for value in ("5", 1.5, 2**70)),
        *((T.ByteType(), 300), (T.IntegerType(), 2**40), (T.StringType(), b"a")),
        *((T.DecimalType(3, 1), Decimal("1234.5")), (T.DecimalType(3, 1), 1.5)),
        *((T.TimestampType(), value) for value in (dt.date(2024, 1, 2), pd.NaT, 5)),
        *((T.DateType(), "2024-01-01"), (T.DateType(), 5), (T.DayTimeIntervalType(), 5)),
        *((T.TimestampNTZType(), 5), (T.BooleanType(), 1)),
        *((POINT, value) for value in ((1, None), 7, {"x": 1, "nmae": "a"})),
        (T.ArrayType(POINT), [{"x": 1}, {"z": 1}]),
        *((T.ArrayType(T.StringType()), value) for value in ("abc", {"a": 1})),
        *((T.ArrayType(T.LongType()), value) for value in (7, ["a"])),
        *((T.MapType(T.StringType(), T.LongType()), value) for value in ([1], {None: 1})),
    ],
    ids=repr,
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_named(data_type: T.DataType, value: Any) -> None:
    values = RowValues(schema_of(T.LongType(), data_type))
    with pytest.raises(StateValueError, match="'c1'") as caught:
        values.to_arrow([(1, None), (1, None), (1, value), (1, value)])
    assert caught.value.row == 2
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.row, str(again)) == (2, str(caught.value))


@pytest.mark.parametrize("data_type", [T.DateType(), T.TimestampType(), T.TimestampNTZType()], ids=repr)
def test_no_time_is_told_from_a_wrong_one(data_type: T.DataType) -> None:
    """NaT is what pandas has for none: the error says what Spark has for it."""
    with pytest.raises(StateValueError, match=r"'c0'.*use None instead of NaT"):
        RowValues(schema_of(data_type)).to_arrow([(pd.NaT,)])


@pytest.mark.parametrize(
    ("zone", "at", "is_told"),
    [
        ("America/New_York", "2026-11-01 01:30", True),
        *(("America/New_York", f"2026-{at}", False) for at in ("11-01 01:30+00:00", "11-01 03:30", "03-08 02:30")),
        ("UTC", "2026-11-01 01:30", False),
    ],
)
def test_a_time_shown_twice_is_told(caplog: pytest.LogCaptureFixture, zone: str, at: str, is_told: bool) -> None:
    """Kept as one of the two, it may be an hour off without an error; the log names the day, and UTC as the way out."""
    python_values._warn_of_repeated_hour.cache_clear()
    with process_in(zone):
        for _ in range(2):
            RowValues(schema_of(T.TimestampType())).to_arrow([(None,), (dt.datetime.fromisoformat(at),)])
    told = [text for text in caplog.messages if "repeat an hour" in text]
    assert len(told) == is_told
    assert all("2026-11-01" in text and "spark.executorEnv.TZ=UTC" in text for text in told)


def test_rows_of_another_length_are_refused() -> None:
    values = RowValues(schema_of(T.LongType(), T.LongType()))
    for wrong in ((1,), (1, 2, 3)):
        with pytest.raises(StateValueError, match="one value for each column") as caught:
            values.to_arrow([(1, 2), wrong])
        assert caught.value.row == 1


@pytest.mark.parametrize("data_type", [T.StringType(), T.BinaryType(), T.ArrayType(T.StringType()), POINT], ids=repr)
def test_states_are_made_in_storage_types(data_type: T.DataType) -> None:
    """What the keys of a slab write together may pass 2 GiB, of which Arrow's small types make several chunks."""
    for t in (data_type, T.MapType(T.StringType(), data_type)):
        [made] = RowValues(schema_of(t)).to_arrow([(None,)]).schema.types
        assert made == storage_type(made)


def test_null_where_the_schema_says_not_null_is_refused() -> None:
    with pytest.raises(StateValueError, match="NOT NULL") as caught:
        RowValues(schema_of(T.LongType(), nullable=False)).to_arrow([(1,), (None,)])
    assert caught.value.row == 1


def test_types_that_cannot_be_kept_are_refused_at_definition() -> None:
    with pytest.raises(InvalidArgumentError, match="c0"):
        RowValues(schema_of(T.YearMonthIntervalType()))


STATE = schema_of(T.LongType(), T.ArrayType(T.LongType()))
DUE = dt.datetime(2024, 1, 1, 0, 0, 1, 500, tzinfo=dt.UTC)


def both(
    value: tuple[Any, ...] | None, timeout_conf: str, watermark_ms: int | None, timed_out: bool = False
) -> tuple[KeyState, GroupState]:
    ours = KeyStates(STATE, timeout_conf, 1000, watermark_ms).open(value, has_timed_out=timed_out)
    sparks = GroupState(
        optionalValue=None if value is None else T.Row(*value),  # type: ignore[arg-type]
        batchProcessingTimeMs=1000,
        eventTimeWatermarkMs=-1 if watermark_ms is None else watermark_ms,
        timeoutConf=timeout_conf,
        hasTimedOut=timed_out,
        watermarkPresent=watermark_ms is not None,
        defined=value is not None,
        updated=False,
        removed=False,
        timeoutTimestamp=-1,
        keyAsUnsafe=b"",
        valueSchema=STATE,
    )
    return ours, sparks


def seen(act: Callable[[], Any]) -> str:
    try:
        return repr(act())
    except (PySparkRuntimeError, PySparkTypeError, PySparkValueError, AttributeError) as exc:
        return f"{type(exc).__name__}: {exc}"


STEPS: list[Callable[[GroupState], Any]] = [
    *map(attrgetter, ("exists", "get", "getOption", "hasTimedOut", "oldTimeoutTimestamp")),
    *map(methodcaller, ("remove", "getCurrentWatermarkMs", "getCurrentProcessingTimeMs")),
    str,
    *(methodcaller("setTimeoutDuration", given) for given in (10, 0, "1 hour")),
    *(methodcaller("setTimeoutTimestamp", given) for given in (2000, 500, 499, -1, DUE)),
    lambda s: s.update((1, [2])),
    lambda s: s.update((None, None)),
    lambda s: s.update((np.int64(5), pd.Timestamp("2024-01-01"))),
    lambda s: s.update((pd.Timedelta(5), np.float32(0.5))),
    lambda s: s.update(None),  # type: ignore[arg-type]
]


@given(
    st.one_of(st.none(), st.just((1, [2]))),
    st.sampled_from(["NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"]),
    st.sampled_from([None, 0, 500]),
    st.booleans(),
    st.lists(st.sampled_from(STEPS), max_size=8),
)
def test_a_state_behaves_as_sparks(
    value: tuple[Any, ...] | None,
    timeout_conf: str,
    watermark_ms: int | None,
    timed_out: bool,
    steps: list[Callable[[GroupState], Any]],
) -> None:
    """G1 to G7: whatever a function does, it sees what it would see on Spark, and Spark would be told the same."""
    ours, sparks = both(value, timeout_conf, watermark_ms, timed_out)
    assert isinstance(ours, GroupState)
    for step in steps:
        assert seen(lambda: step(ours)) == seen(lambda: step(sparks))  # noqa: B023
    assert ours.json() == sparks.json()
    assert ours.changed_value == ("put" if sparks._updated else "delete" if sparks._removed else None)
    assert ours.timer_ms == (None if sparks._timeout_timestamp == -1 else int(sparks._timeout_timestamp))
    if ours.changed_value == "put":
        assert ours.value == tuple(sparks._value)


def test_the_private_attributes_of_spark_are_there_and_their_lack_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were one renamed, functions would see no state, or nothing that they do would be kept, and nothing would fail."""
    _, sparks = both((1, [2]), "NoTimeout", None)
    assert [name for name in pandas_with_state.PRIVATE if name not in vars(sparks)] == []
    monkeypatch.setattr(pandas_with_state, "PRIVATE", ("_value", "_gone"))
    with pytest.raises(HoldfastError, match="lacking=_gone"):
        both((1, [2]), "NoTimeout", None)


class Place:
    """An object whose attributes are the fields of a struct, which Spark takes, too."""

    def __init__(self, x: int) -> None:
        self.x = x


# What a function may go on using after the call, and how it changes it.
REUSED: dict[str, tuple[str, Any, Callable[[Any], object]]] = {
    "dict of a struct": ("struct<x:long>", {"x": 1}, lambda value: value.update(x=3)),
    "list of a struct": ("struct<x:long>", [1], lambda value: value.__setitem__(0, 3)),
    "object of a struct": ("struct<x:long>", Place(1), lambda value: setattr(value, "x", 3)),
    "list": ("array<long>", [1], lambda value: value.append(3)),
    "list in a list": ("array<array<long>>", [[1]], lambda value: value[0].append(3)),
    "numpy's array": ("array<long>", np.array([1]), lambda value: value.fill(3)),
    "deque": ("array<long>", deque([1]), lambda value: value.append(3)),
    "dict": ("map<string,long>", {"x": 1}, lambda value: value.update(x=3)),
    "list in a dict": ("map<string,array<long>>", {"x": [1]}, lambda value: value["x"].append(3)),
    "bytearray": ("binary", bytearray(b"1"), lambda value: value.extend(b"3")),
    "bytearray in a tuple": ("struct<x:binary>", (bytearray(b"1"),), lambda value: value[0].extend(b"3")),
}


@pytest.mark.parametrize("what", REUSED)
def test_what_the_function_goes_on_using_is_kept_as_it_was_when_the_call_ended(what: str) -> None:
    """States are written for many keys together, long after the call; Spark pickles each when its call ends."""
    ddl, given_value, change = REUSED[what]
    value = copy.deepcopy(given_value)
    schema = parse_schema(f"v {ddl}")
    state = KeyStates(schema, "NoTimeout", 1000, None).open(None)
    state.update((value,))
    kept = state.value
    change(value)
    assert through_ours(schema, [kept]) == through_ours(schema, [(given_value,)])
    assert through_ours(schema, [kept]) != through_ours(schema, [(value,)])


def test_a_value_that_is_no_tuple_is_refused_in_words() -> None:
    """A state of one column invites a bare value; Python's own words name neither update nor a tuple."""
    state: Any = KeyStates(STATE, "NoTimeout", 1000, None).open(None)
    with pytest.raises(TypeError, match=r"state\.update takes a tuple with one value.*not int"):
        state.update(5)
    assert not state.exists


def test_numbers_of_a_memoryview_are_not_taken_for_bytes() -> None:
    """Nor lost: it cannot be copied as it is."""
    schema = parse_schema("v array<long>")
    state = KeyStates(schema, "NoTimeout", 1000, None).open(None)
    state.update((memoryview(np.array([1, -2], np.int64)),))
    assert through_ours(schema, [state.value]) == [([1, -2],)]


def test_states_of_two_keys_are_apart() -> None:
    states = KeyStates(STATE, "ProcessingTimeTimeout", 1000, None)
    first, second = states.open(None), states.open(None)
    first.update((1, []))
    first.setTimeoutDuration(5)
    assert (second.exists, second.changed_value, second.timer_ms) == (False, None, None)


@pytest.mark.parametrize("ddl", ["string", "array<string>", "struct<t string>", "map<int, string>"])
def test_text_that_a_vectorised_operator_has_kept_and_python_cannot_hold_is_named(ddl: str) -> None:
    """An operator may change its API between two runs: both have one table of state."""
    schema = parse_schema(f"n long, raw {ddl}")
    binary = pa.array([b"\xff\xfe"])
    text = binary.view(pa.string())
    of_type = {
        "string": text,
        "array<string>": pa.ListArray.from_arrays([0, 1], text),
        "struct<t string>": pa.StructArray.from_arrays([text], ["t"]),
        "map<int, string>": pa.MapArray.from_arrays([0, 1], pa.array([1], pa.int32()), text),
    }
    with pytest.raises(InvalidArgumentError, match="column 'raw' of the state has text that is not UTF-8"):
        RowValues(schema).to_tuples(pa.table({"n": [1], "raw": of_type[ddl]}))
