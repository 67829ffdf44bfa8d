"""What a query is given to begin with: items N, and L8 and O1 where they are about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming import StatefulProcessor

import holdfast
from holdfast.errors import InvalidArgumentError
from tests.spark.answers import text_of
from tests.spark.parity.engines import Open, Trial
from tests.spark.processors.engines import (
    BY_PANDAS,
    BY_ROW,
    ENGINES,
    OPERATOR,
    SPARK,
    ProcessorEngine,
    by_engine,
    engines,
    later,
    ours,
)
from tests.spark.processors.showing import SHOWN, as_output

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow(6)]

SCHEMA = "k string, n int"
Rows = list[tuple[Any, ...]]


class Beginning(StatefulProcessor):
    """Counts up from an initial state, and shows a key when a timer of it fires."""

    def __init__(self, api: str, timer_ms: int | None = None, *, fails: bool = False) -> None:
        self._api, self._timer_ms, self._fails = api, timer_ms, fails

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n int")
        self._calls = handle.getListState("calls", "rows int")

    def handleInitialState(self, key: tuple[Any, ...], initialState: Any, timerValues: Any) -> Any:
        values = [initialState.n] if self._api == "row" else [int(n) for n in initialState["n"]]
        before = self._count.get()
        self._count.update(((before[0] if before else 0) + sum(values),))
        self._calls.appendValue((len(values),))
        if self._timer_ms is not None:
            self._handle.registerTimer(self._timer_ms)
        return as_output(self._api, what="dropped", shown="")

    def handleInputRows(self, key: tuple[Any, ...], rows: Any, timerValues: Any) -> Any:
        if self._fails:
            raise LookupError("no rows today")
        values = [row.n for row in rows] if self._api == "row" else [int(n) for frame in rows for n in frame["n"]]
        (before,) = self._count.get() or (0,)
        self._count.update((before + sum(values),))
        yield as_output(self._api, what=f"{key[0]}", shown=f"{before}+{sum(values)} {len(list(self._calls.get()))}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        yield as_output(self._api, what=f"timer of {key[0]}", shown=f"{self._count.get()[0]}")


def begun(
    on: Trial,
    engine: ProcessorEngine,
    initial: Any,
    *arguments: Any,
    time_mode: str = "None",
    processor: Beginning | None = None,
) -> DataFrame:
    """Return a query that counts, begun with initial rows: a list, or what Spark's method takes."""
    if isinstance(initial, list):
        initial = on.session.createDataFrame(initial, SCHEMA).groupBy("k")
    frame = on.source("k string, n int, at timestamp", delay="0 seconds" if time_mode == "EventTime" else None)
    processor = processor or Beginning(engine.api, *arguments)
    return engine.transform(frame, ["k"], processor, SHOWN, "update", time_mode, initialState=initial)


def feed(on: Trial, *rows: tuple[str | None, int]) -> None:
    """Add the rows of a micro-batch: key and number."""
    columns = {
        "k": pa.array([k for k, _ in rows], pa.string()),
        "n": pa.array([n for _, n in rows], pa.int32()),
        "at": pa.array([1_000_000] * len(rows), pa.timestamp("us", "UTC")),
    }
    on.feed_table(pa.table(columns))


@by_engine(engines(1))
def test_n1_n2_n3_initial_state_is_read_once(engine: ProcessorEngine, run_on: Open) -> None:
    """N1, N2, N3: each row of each key, also of keys without rows; not again at a restart, which may leave it out."""
    with run_on(engine) as on:
        feed(on, ("a", 1), ("b", 2), (None, 3))
        on.run(begun(on, engine, [("a", 10), ("a", 20), ("c", 30), (None, 40)]))
        feed(on, ("c", 3), ("a", 1))
        on.run(begun(on, engine, [("a", 1000), ("d", 1000)]))
        feed(on, ("c", 3), ("d", 1))
        on.run(begun(on, engine, None))
        calls = 2 if engine.api == "row" else 1
        assert sorted(on.batches[0]) == [("None", "40+3 1"), ("a", f"30+1 {calls}"), ("b", "0+2 0")]
        assert sorted(on.batches[1]) == [("a", f"31+1 {calls}"), ("c", "30+3 1")]
        assert sorted(on.batches[2]) == [("c", "33+3 1"), ("d", "0+1 0")]


@by_engine(engines(2))
def test_n3_timers_of_the_initial_state_fire_in_the_first_micro_batch(engine: ProcessorEngine, run_on: Open) -> None:
    """N3, N4, O1: after all rows, also for keys without rows, and once for each key."""
    with run_on(engine) as on:
        feed(on, ("a", 1), ("b", 2))
        on.run(begun(on, engine, [("a", 10), ("c", 30), ("d", 40)], 0, time_mode="EventTime"))
        timers = [row for row in on.batches[0] if row[0].startswith("timer")]
        assert sorted(timers) == [("timer of a", "11"), ("timer of c", "30"), ("timer of d", "40")]
        assert not [row for rows in on.batches[1:] for row in rows]


@by_engine(later())
def test_a_first_micro_batch_that_fails_begins_anew(engine: ProcessorEngine, run_on: Open) -> None:
    """What the failed attempt made of the initial state is not counted twice."""
    with run_on(engine) as on:
        feed(on, ("a", 1))
        failing = begun(on, engine, [("a", 10)], processor=Beginning(engine.api, fails=True))
        assert "no rows today" in text_of(on.failure(failing))
        on.run(begun(on, engine, [("a", 10), ("b", 20)]))
        assert on.batches[0] == [("a", "10+1 1")]
        shown = holdfast.read_state(on.session, on.folder / "query", OPERATOR, table="v.count").to_pylist()
        assert sorted(shown, key=str) == [{"k": "a", "n": 11}, {"k": "b", "n": 20}]


@by_engine(later())
def test_initial_state_that_spark_hands_over_in_pieces(engine: ProcessorEngine, run_on: Open) -> None:
    """Spark does not say which piece is the last: all of them are the first version."""
    with run_on(engine, **{"spark.sql.execution.arrow.maxRecordsPerBatch": "2"}) as on:
        feed(on, ("k3", 1))
        numbers = on.session.range(0, 140, 1, numPartitions=7)
        initial = numbers.selectExpr("concat('k', id % 20) as k", "cast(id as int) as n").groupBy("k")
        on.run(begun(on, engine, initial))
        feed(on, ("k4", 1))
        on.run(begun(on, engine, None))
        (key3, shown3), (key4, shown4) = on.batches[0][0], on.batches[1][0]
        assert (key3, shown3.split()[0]) == ("k3", f"{sum(range(3, 140, 20))}+1")
        assert (key4, shown4.split()[0]) == ("k4", f"{sum(range(4, 140, 20))}+1")
        shown = holdfast.read_state(on.session, on.folder / "query", OPERATOR, table="v.count").to_pylist()
        assert sum(row["n"] for row in shown) == sum(range(140)) + 2


@by_engine(engines(5))
def test_n8_initial_state_in_a_batch_query(engine: ProcessorEngine, run_on: Open) -> None:
    """N8: as in a stream; due timers of keys without rows fire."""
    with run_on(engine) as on:
        rows = on.session.createDataFrame([("a", 1), ("b", 2)], SCHEMA)
        initial = on.session.createDataFrame([("a", 10), ("c", 30)], SCHEMA).groupBy("k")
        processor = Beginning(engine.api, 0)
        frame = engine.transform(rows, ["k"], processor, SHOWN, "append", "ProcessingTime", initialState=initial)
        found = sorted(on.collect(frame))
        assert found == [("a", "10+1 1"), ("b", "0+2 0"), ("timer of a", "11"), ("timer of c", "30")]


class Noting(Beginning):
    """Writes a letter into a file for each call of ``handleInitialState``."""

    calls: Path

    def handleInitialState(self, key: tuple[Any, ...], initialState: Any, timerValues: Any) -> None:
        with self.calls.open("a") as file:
            file.write("x")


@by_engine(later(ENGINES))
def test_n2_each_initial_row_is_one_call(engine: ProcessorEngine, run_on: Open) -> None:
    """N2: also where Spark's frames are small, of which each makes a shard's first version anew."""
    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "10", "spark.holdfast.shards": "2"}
    with run_on(engine, **conf) as on:
        feed(on, ("a", 1))
        processor = Noting(engine.api)
        processor.calls = on.folder / "calls"
        initial = on.session.range(200).selectExpr("cast(id as string) as k", "cast(id as int) as n").groupBy("k")
        on.run(begun(on, engine, initial, processor=processor))
        assert len(processor.calls.read_text()) == 200


class Gathering(Beginning):
    """Keeps the numbers of a key in a list, and shows it when a timer fires."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._numbers = handle.getListState("numbers", "n int")

    def _add(self, pieces: Any) -> None:
        for piece in pieces:
            self._numbers.appendList([(piece.n,)] if self._api == "row" else [(int(n),) for n in piece["n"]])

    def handleInitialState(self, key: tuple[Any, ...], initialState: Any, timerValues: Any) -> None:
        self._add([initialState])

    def handleInputRows(self, key: tuple[Any, ...], rows: Any, timerValues: Any) -> Any:
        self._add(rows)
        self._handle.registerTimer(0)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        yield as_output(self._api, what=key[0], shown=f"{sorted(n for (n,) in self._numbers.get())}")


@by_engine([*SPARK, *ours(7, [BY_ROW[0], BY_PANDAS[0]])])
def test_n8_lists_in_a_batch_query_with_initial_state(engine: ProcessorEngine, run_on: Open) -> None:
    """N8: elements that rows append stand beside those of the initial state, not in their place."""
    with run_on(engine) as on:
        rows = on.session.createDataFrame([("a", 1), ("a", 2)], SCHEMA)
        initial = on.session.createDataFrame([("a", 10), ("a", 20), ("a", 30)], SCHEMA).groupBy("k")
        processor = Gathering(engine.api)
        frame = engine.transform(rows, ["k"], processor, SHOWN, "append", "ProcessingTime", initialState=initial)
        assert on.collect(frame) == [("a", "[1, 2, 10, 20, 30]")]


@by_engine(ours(8))
def test_n6_columns_of_the_initial_frame_may_have_other_names(engine: ProcessorEngine, run_on: Open) -> None:
    """N6: number and types of the keys count, not their names, nor the order of columns."""
    with run_on(engine) as on:
        feed(on, ("a", 1))
        other = on.session.createDataFrame([(10, "a"), (20, "b")], "n int, `the key` string").groupBy("The Key")
        on.run(begun(on, engine, other))
        assert on.batches[0] == [("a", "10+1 1")]


def test_n6_n7_what_is_no_initial_state(run_on: Open) -> None:
    """N6, N7: at definition, where Spark finds the state of other keys, or takes a stream."""
    engine = BY_ROW[0]
    with run_on(engine) as on:
        feed(on, ("a", 1))
        of_numbers = on.session.createDataFrame([(1, 10)], "k int, n int")
        of_texts = on.session.createDataFrame([("a", 10)], SCHEMA)
        wrong = [
            (of_numbers.groupBy("k"), r"stream=\['string'\] initial_state=\['int'\]"),
            (of_texts.groupBy("k", "n"), "grouped by different keys"),
            (of_texts, "must be a grouped DataFrame"),
            (of_texts.groupBy(), "must be grouped by columns"),
            (of_texts.groupBy(F.upper("k")), "must be grouped by columns"),
            (of_texts.groupBy(F.upper("k").alias("k")), "must be grouped by columns"),
            (on.source(SCHEMA, delay=None).groupBy("k"), "must be a batch DataFrame"),
        ]
        for given, text in wrong:
            with pytest.raises(InvalidArgumentError, match=text):
                begun(on, engine, given)


def test_n6_what_may_be_null_inside_of_keys(run_on: Open) -> None:
    """N6: elements of a literal are never null, those of a file's column may be: the state is that of the same keys."""
    engine = BY_ROW[0]
    with run_on(engine) as on:
        literal = on.session.range(1).select(F.array(F.lit(1), F.lit(2)).alias("k"), F.lit(10).alias("n"))
        column = on.session.createDataFrame([([1, 2], 5)], "k array<int>, n int")
        for rows, known, shown in ((column, literal, "10+5 1"), (literal, column, "5+10 1")):
            counted = engine.transform(
                rows, ["k"], Beginning(engine.api), SHOWN, "update", "None", initialState=known.groupBy("k")
            )
            assert [tuple(row) for row in counted.collect()] == [("[1, 2]", shown)]


class Spelling(Beginning):
    """Fails on one key of the initial state."""

    def handleInitialState(self, key: tuple[Any, ...], initialState: Any, timerValues: Any) -> None:
        if key == ("b",):
            raise ValueError("b is misspelt")


@by_engine(later())
def test_an_exception_for_an_initial_row_names_the_key(engine: ProcessorEngine, run_on: Open) -> None:
    """With the user's text, and no state is left."""
    with run_on(engine) as on:
        feed(on, ("a", 1))
        text = text_of(on.failure(begun(on, engine, [("a", 1), ("b", 2)], processor=Spelling(engine.api))))
        assert "b is misspelt" in text
        assert f"raised in operator '{OPERATOR}' for key ('b',)" in text
        on.run(begun(on, engine, [("a", 5)]))
        assert on.batches[0] == [("a", "5+1 1")]
