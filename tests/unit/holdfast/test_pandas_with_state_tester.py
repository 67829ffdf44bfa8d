"""The tester of functions: the same rules as in a query, without Spark."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import PySparkRuntimeError, PySparkValueError
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.streaming.state import GroupState

from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.testing import PandasWithStateTester
from holdfast.testing.ddl import parse_schema

INPUT = "user string, v long, at timestamp"
OUTPUT = "user string, n long, over boolean"
NOON = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
NOON_MS = int(NOON.timestamp() * 1000)


def row(user: str | None, v: int = 1, minutes: int = 0) -> tuple[Any, ...]:
    return (user, v, NOON + dt.timedelta(minutes=minutes))


def count(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Count rows; after ten minutes without any, say so and forget."""
    n = state.get[0] if state.exists else 0
    n += sum(len(frame) for frame in frames)
    if state.hasTimedOut:
        state.remove()
    else:
        state.update((n,))
        if state._timeout_conf == "ProcessingTimeTimeout":
            state.setTimeoutDuration(600_000)
        elif state._timeout_conf == "EventTimeTimeout":
            state.setTimeoutTimestamp(max(state.getCurrentWatermarkMs(), NOON_MS) + 600_000)
    yield pd.DataFrame({"user": [key[0]], "n": [n], "over": [state.hasTimedOut]})


def make(func: Any = count, timeout_conf: Any = "NoTimeout", **options: Any) -> PandasWithStateTester:
    return PandasWithStateTester(func, "user", INPUT, OUTPUT, "n long", timeout_conf, **options)


def test_state_is_carried_from_batch_to_batch() -> None:
    counts = make()
    assert counts.test([row("b"), row("a"), row(None), row("b")]) == [
        T.Row(user=None, n=1, over=False),
        T.Row(user="a", n=1, over=False),
        T.Row(user="b", n=2, over=False),
    ]
    assert counts.test([row("b")]) == [T.Row(user="b", n=3, over=False)]
    assert (counts.peekState("b"), counts.peekState(None), counts.peekState("nobody")) == ((3,), (1,), None)
    assert counts.peekTimeout("b") is None
    assert counts.test([]) == []
    counts.updateState("a", (40,))
    counts.updateState("b", (50,))
    counts.deleteState("b")
    assert counts.test([row("a"), row("b")]) == [T.Row(user="a", n=41, over=False), T.Row(user="b", n=1, over=False)]
    with pytest.raises(SchemaMismatchError):
        counts.updateState("a", ("text",))
    assert counts.peekState("a") == (41,)


def test_frames_in_and_out() -> None:
    counts = make()
    rows = pd.DataFrame({"at": [pd.Timestamp("2024-01-01")] * 2, "v": [1, 2], "user": ["a", "a"]})
    assert counts.testInPandas(rows).to_dict("list") == {"user": ["a"], "n": [2], "over": [False]}
    assert counts.testInPandas(rows[:0]).to_dict("list") == {"user": [], "n": [], "over": []}


def test_processing_time_fires_timeouts_and_only_later_ones() -> None:
    """P2: what is due is strictly before now."""
    counts = make(timeout_conf="ProcessingTimeTimeout")
    counts.test([row("a")])
    assert counts.setProcessingTime(1000) == []
    counts.test([row("b")])
    assert (counts.peekTimeout("a"), counts.peekTimeout("b")) == (600_000, 601_000)
    assert counts.setProcessingTime(600_000) == []
    assert counts.setProcessingTime(600_001) == [T.Row(user="a", n=1, over=True)]
    assert (counts.peekState("a"), counts.peekTimeout("a")) == (None, None)
    assert counts.setProcessingTime(10**9) == [T.Row(user="b", n=1, over=True)]


def test_rows_put_a_timeout_off_before_it_fires() -> None:
    """C4: keys with rows first, and then what is still due."""
    counts = make(timeout_conf="ProcessingTimeTimeout")
    counts.test([row("a"), row("b")])
    counts._processing_ms = 700_000
    assert counts.test([row("b")]) == [T.Row(user="b", n=2, over=False), T.Row(user="a", n=1, over=True)]


def test_late_rows_are_dropped_with_event_time_timeouts_only() -> None:
    """P3, row by row."""
    late, on_time = row("a", minutes=-1), row("a", minutes=1)
    for timeout_conf, n in (("EventTimeTimeout", 1), ("ProcessingTimeTimeout", 3), ("NoTimeout", 3)):
        counts = make(timeout_conf=timeout_conf, eventTime="at")
        counts.setWatermark(NOON_MS)
        assert counts.test([late, row("a"), on_time]) == [T.Row(user="a", n=n, over=False)]


def test_the_watermark_fires_timeouts() -> None:
    counts = make(timeout_conf="EventTimeTimeout", eventTime="at")
    counts.test([row("a"), row("b", minutes=5)])
    assert counts.setWatermark(NOON_MS + 600_000) == []
    assert counts.setWatermark(NOON_MS + 600_001) == [T.Row(user="a", n=1, over=True), T.Row(user="b", n=1, over=True)]


def test_a_window_is_late_when_it_has_ended() -> None:
    def ends(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"n": [sum(len(frame) for frame in frames)]})

    windows = PandasWithStateTester(
        ends, "k", "k int, w struct<start:timestamp,end:timestamp>", "n int", "n int", "EventTimeTimeout", eventTime="w"
    )
    windows.setWatermark(NOON_MS)
    hour = dt.timedelta(hours=1)
    assert windows.test([(1, (NOON - hour, NOON)), (1, (NOON, NOON + hour))]) == [T.Row(n=1)]


def test_a_function_that_fails_changes_nothing() -> None:
    """C7, and the error tells whose key it was."""

    def fails(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield from count(key, frames, state)
        if key[0] == "b":
            raise KeyError("mine")

    counts = make(fails, "ProcessingTimeTimeout")
    with pytest.raises(KeyError, match="mine") as caught:
        counts.test([row("a"), row("b")])
    assert "fails" in caught.value.__notes__[0]
    assert "('b',)" in caught.value.__notes__[0]
    assert (counts.peekState("a"), counts.peekTimeout("a")) == (None, None)
    assert counts.test([row("a")]) == [T.Row(user="a", n=1, over=False)]


def test_a_dict_that_the_function_fills_again_for_each_key() -> None:
    """Each key keeps what the dict held when its call ended."""
    shared: dict[str, int] = {}

    def fill(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> list[pd.DataFrame]:
        shared["x"] = sum(int(frame["v"].sum()) for frame in frames)
        state.update((shared,))
        return []

    tester = PandasWithStateTester(fill, "user", INPUT, OUTPUT, "last struct<x:long>")
    tester.test([row("a", 1), row("b", 2), row("c", 3)])
    assert [tester.peekState(key) for key in "abc"] == [(T.Row(x=1),), (T.Row(x=2),), (T.Row(x=3),)]


def test_a_state_that_cannot_be_kept_tells_its_key() -> None:
    def generate(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> list[pd.DataFrame]:
        state.update(((n for n in [1]) if key[0] == "b" else [1],))
        return []

    with pytest.raises(TypeError, match="generator") as caught:
        PandasWithStateTester(generate, "user", INPUT, OUTPUT, "n array<int>").test([row("a"), row("b"), row("c")])
    assert caught.value.__notes__ == ["raised in operator 'generate' for key ('b',)"]


def test_a_timeout_that_nobody_clears() -> None:
    """P7: what Spark documents is the default, what Spark does can be asked for."""

    def ignores(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if not state.hasTimedOut:
            state.setTimeoutDuration(10)
        yield pd.DataFrame({"user": [key[0]], "n": [0], "over": [state.hasTimedOut]})

    for rule, again in (("documented", 0), ("spark", 1)):
        timeouts = make(ignores, "ProcessingTimeTimeout", timeouts=rule)
        timeouts.test([row("a")])
        assert len(timeouts.setProcessingTime(100)) == 1
        assert len(timeouts.setProcessingTime(200)) == again


def test_errors_are_those_of_a_query() -> None:
    def no_watermark(key: Any, frames: Any, state: GroupState) -> Any:
        state.getCurrentWatermarkMs()

    def no_state(key: Any, frames: Any, state: GroupState) -> Any:
        return state.get

    with pytest.raises(PySparkRuntimeError):
        make(no_watermark).test([row("a")])
    with pytest.raises(PySparkValueError):
        make(no_state).test([row("a")])
    with pytest.raises(AssertionError):
        make(timeout_conf="Never")
    for wrong in ({"timeout_conf": "EventTimeTimeout"}, {"eventTime": "no"}):
        with pytest.raises(InvalidArgumentError):
            make(**wrong)
    with pytest.raises(InvalidArgumentError, match="'other'"):
        PandasWithStateTester(count, "other", INPUT, OUTPUT, "n long")
    with pytest.raises(InvalidArgumentError, match="eventTime"):
        make().setWatermark(1)
    moved = make(eventTime="at")
    moved.setProcessingTime(5)
    moved.setWatermark(5)
    for back in (moved.setProcessingTime, moved.setWatermark):
        with pytest.raises(InvalidArgumentError, match="forward"):
            back(5)


def test_keys_of_several_columns_and_equal_zeros() -> None:
    """Keys are the same where Spark says so: 0.0 is -0.0, and every NaN is one."""

    def keys(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        state.update((1,))
        yield pd.DataFrame({"n": [sum(len(frame) for frame in frames)]})

    made = PandasWithStateTester(keys, ["a", "b"], "a double, b int", "n int", "n int")
    assert made.test([(0.0, 1), (-0.0, 1), (float("nan"), 1), (float("nan"), 1), (0.0, None)]) == [
        T.Row(n=1), T.Row(n=2), T.Row(n=2)
    ]  # fmt: skip
    assert made.peekState((-0.0, 1)) == (1,)


A_PAIR = T.StructType().add("x", T.IntegerType()).add("t", T.TimestampType())


@pytest.mark.parametrize(
    ("ddl", "schema"),
    [
        ("a int", T.StructType().add("a", T.IntegerType())),
        (
            " a: INT NOT NULL , `b c` decimal(5, 2), d decimal",
            T.StructType().add("a", T.IntegerType(), False).add("b c", T.DecimalType(5, 2)).add("d", T.DecimalType()),
        ),
        (
            "m map<string,array<struct<x:int,t:timestamp>>>,n bigint",
            T.StructType().add("m", T.MapType(T.StringType(), T.ArrayType(A_PAIR))).add("n", T.LongType()),
        ),
    ],
)
def test_ddl_strings_are_understood(ddl: str, schema: T.StructType) -> None:
    assert parse_schema(ddl) == schema
    assert parse_schema(schema) is schema


@pytest.mark.parametrize(
    "ddl", ["", "a", "a int,", "a int b", "a nothing", "a array<int", "a map<int>", "a int; b int"]
)
def test_other_strings_are_refused(ddl: str) -> None:
    with pytest.raises(InvalidArgumentError, match="StructType"):
        parse_schema(ddl)


def test_a_key_that_is_given_twice_is_one_key_that_is_shown_twice() -> None:
    """As in a query, whose ``groupBy`` takes what Spark's takes."""

    def count(key: Any, frames: Any, state: Any) -> Any:
        n = (state.getOption or (0,))[0] + sum(map(len, frames))
        state.update((n,))
        yield pd.DataFrame({"key": [repr([str(part) for part in key])], "n": [n]})

    tester = PandasWithStateTester(count, ["b", "a", "b"], "a string, b long", "key string, n long", "n long")
    assert tester.test([("x", 1), ("x", 1)]) == [T.Row(key="['1', 'x', '1']", n=2)]
    assert tester.peekState((1, "x", 1)) == (2,)
    with pytest.raises(InvalidArgumentError, match="one value for each key column, values=1 columns=3"):
        tester.peekState(1)
