"""Late rows, micro-batches without data, output modes, and state that was expired or deleted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from tests.spark.answers import text_of
from tests.spark.parity.engines import Open, Trial
from tests.spark.processors.engines import (
    BY_ROW,
    OPERATOR,
    SPARK,
    SPARK_ROW,
    ProcessorEngine,
    by_engine,
    engines,
    ours,
)
from tests.spark.processors.scripts.clocked import ClockedQuery
from tests.spark.processors.scripts.script import INPUT, OUTPUT, Case, Script, Scripted, now_ms
from tests.spark.processors.showing import SHOWN, Calling
from tests.spark.processors.test_keys import ONE_PARTITION
from tests.spark.processors.ways import Run, Way, by_way, ways
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow(4)]


def scripted(on: Trial, engine: ProcessorEngine, frame: DataFrame, time_mode: str, mode: str = "append") -> DataFrame:
    """Return what rows do, and nothing when a timer fires."""
    processor = Scripted(engine.api, dict.fromkeys(("a", "b", "clock", "mixed"), ""))
    return engine.transform(frame, ["key"], processor, OUTPUT, mode, time_mode)


@by_engine(engines(4))
@pytest.mark.parametrize("time_mode", cases(["EventTime", "None"]))
def test_w3_late_rows(engine: ProcessorEngine, time_mode: str, run_on: Open) -> None:
    """W3: late up to and including the watermark of the micro-batch before, row by row, and with event time only.

    The watermarks are 0, 100, 200 and 400.
    """
    with run_on(engine) as on:
        on.feed([("a", 100, "")])
        on.feed([("a", 200, "")])
        on.feed(
            [*((f"at {ms}", ms, "") for ms in (99, 100, 101, 200, 400)), ("mixed", 100, "?1"), ("mixed", 101, "?2")]
        )
        on.feed([(f"at {ms}", ms, "") for ms in (199, 200, 201, 399)])
        on.run(scripted(on, engine, on.source(), time_mode), "append")
        batches = [dict(rows) for rows in on.batches]
    if time_mode == "None":
        assert set(batches[2]) == {"mixed", "at 99", "at 100", "at 101", "at 200", "at 400"}
        assert set(batches[3]) == {"at 199", "at 200", "at 201", "at 399"}
        assert batches[2]["mixed"] == "rows 1, 2"
    else:
        assert set(batches[2]) == {"mixed", "at 101", "at 200", "at 400"}
        assert set(batches[3]) == {"at 201", "at 399"}
        assert batches[2]["mixed"] == "rows 2"


@pytest.mark.all
@by_engine([SPARK_ROW, BY_ROW[0], BY_ROW[1]])
def test_w3_event_times_beyond_those_of_pandas(engine: ProcessorEngine, run_on: Open) -> None:
    """W3: rows of the years 9000 and 1500 travel to their shard; with the first, the watermark leaps."""
    with run_on(engine) as on:
        on.feed([("a", 100, "")])
        on.feed([("a", 200, ""), ("a", 221_845_392_000_000, "?1"), ("b", -14_831_769_600_000, "")])
        on.feed([("a", 300, ""), ("b", 221_845_392_000_001, "")])
        on.feed([("a", 400, ""), ("b", 221_845_392_000_001, ""), ("a", 221_845_392_000_002, "?2")])
        on.run(scripted(on, engine, on.source(), "EventTime"), "append")
        assert [sorted(rows) for rows in on.batches if rows] == [
            [("a", "rows")],
            [("a", "rows 1")],
            [("a", "rows"), ("b", "rows")],
            [("a", "rows 2"), ("b", "rows")],
        ]


@pytest.mark.all
@by_engine(engines(5))
def test_w14_a_window_is_late_when_its_end_is(engine: ProcessorEngine, run_on: Open) -> None:
    """W14: a window carries the watermark too."""
    with run_on(engine) as on:
        for ms in (1000, 5000, 12_000):
            on.feed([("a", ms, ""), ("late?", 500, "")])
        on.feed([("b", 13_000, ""), ("late?", 500, "")])
        frame = on.source().withColumn("at", F.window("at", "2 seconds"))
        on.run(scripted(on, engine, frame, "EventTime"), "append")
        called = [{key for key, _ in rows} for rows in on.batches]
    assert [sorted(keys) for keys in called if keys] == [*[["a", "late?"]] * 3, ["b"]]


@by_engine([SPARK_ROW, BY_ROW[0]])
@pytest.mark.parametrize("mode", cases(["Update", "Complete"]))
def test_w7_output_modes(engine: ProcessorEngine, mode: str, run_on: Open) -> None:
    """W7: any mode is as good as append, and the query's may be another, also after a restart."""
    with run_on(engine) as on:
        for query_mode in ("update", "append"):
            on.feed([("a", 1, "?1")])
            on.run(scripted(on, engine, on.source(), "None", mode), query_mode)
            assert ("a", "rows 1") in [row for batch in on.batches for row in batch]
            on.batches.clear()


@by_engine(engines(6))
def test_w5_without_time_nothing_happens_in_a_batch_without_data(engine: ProcessorEngine, run_on: Open) -> None:
    """W5: Spark makes one when the watermark moves on, and nobody is called in it."""
    with run_on(engine) as on:
        on.feed([("a", 1000, "")])
        on.feed([("a", 5000, "")])
        on.run(scripted(on, engine, on.source(), "None"), "append")
        assert on.batches == [[("a", "rows")], [("a", "rows")], []]


def _counts(key: Any, rows: Any, processor: Calling) -> Any:
    (n,) = processor.value.get() or (0,)
    processor.value.update((n + 1,))
    return [processor.emit(key[0], n)]


class _Deleting(Calling):
    """Deletes its value in `init`."""

    def init(self, handle: Any) -> None:
        handle.deleteIfExists("value")
        super().init(handle)


@by_engine(engines(7))
def test_d7_a_variable_that_is_deleted_is_empty(engine: ProcessorEngine, run_on: Open) -> None:
    """D7, E11: for all keys, in each batch while the line is there; other variables stay."""
    with run_on(engine) as on:
        for processor in (Calling, Calling, _Deleting, Calling):
            on.feed_table(pa.table({"k": ["a", "b"]}))
            made = processor(engine.api, _counts)
            on.run(engine.transform(on.source("k string", delay=None), ["k"], made, SHOWN, "append", "none"), "append")
        counts = [{key: int(n) for key, n in rows} for rows in on.batches if rows]
    assert counts == [{"a": n, "b": n} for n in (0, 1, 0, 1)]


class _DeletingTooLate(Calling):
    """Deletes its value in `init`, after it has declared it."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        handle.deleteIfExists("value")


@by_way(ways(2))
def test_d7_a_variable_that_is_deleted_after_its_declaration(way: Way, run: Run) -> None:
    """D7: each use of it is an error, which may be caught, and ends no task."""

    def uses(key: Any, rows: Any, processor: Calling) -> Any:
        shown = []
        for use in (processor.value.exists, processor.value.get, lambda: processor.value.update((1,))):
            with pytest.raises(PySparkRuntimeError) as caught:
                use()
            shown.append(str(caught.value).partition(":")[0])
        return [processor.emit(key[0], shown)]

    rows = run(way, pa.table({"k": ["a", "b"]}), "k string", ["k"], _DeletingTooLate(way.api, uses), SHOWN)
    words = ["Error checking value state exists", "Error getting value state", "Error updating value state"]
    assert sorted(rows) == [(key, repr(words)) for key in "ab"]


@pytest.mark.all
def test_e8_spark_refuses_frames_after_rows(run_on: Open) -> None:
    """E8: so that we learn when it changes; ours goes on (`test_e8_e9_ttl_and_the_api_come_and_go`)."""
    with run_on(SPARK_ROW) as on:
        for engine in SPARK:
            on.feed_table(pa.table({"k": ["a"]}))
            source = on.source("k string", delay=None)
            frame = engine.transform(source, ["k"], Calling(engine.api, _counts), SHOWN, "append", "none")
            if engine is SPARK_ROW:
                on.run(frame, "append")
            else:
                error = on.failure(frame, "append")
                assert "STREAMING_STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA" in text_of(error)


@by_way(ways(6, batch_only=True))
@pytest.mark.parametrize("time_mode", cases(["eventTime", "processingTime", "none"]))
def test_b2_times_of_a_batch_query(way: Way, time_mode: str, run: Run) -> None:
    """B1, B2: the time of now, and -1 as the watermark; state begins empty, and what is due by then fires."""

    def times(key: Any, rows: Any, processor: Any) -> Any:
        if time_mode != "none":
            for due_ms in (-5, 1000, 1 << 50):
                processor.handle.registerTimer(due_ms)
        return [processor.emit("value", processor.value.get())]

    def expired(key: Any, due_ms: int, processor: Any) -> Any:
        return [processor.emit("timer", due_ms)]

    processor = Calling(way.api, times, expired)
    shown = run(way, pa.table({"k": ["a"]}), "k string", ["k"], processor, SHOWN, time_mode, conf=ONE_PARTITION)
    fired = {"processingTime": ["-5", "1000"], "eventTime": ["-5"], "none": []}[time_mode]
    assert shown == [("value", "None"), *(("timer", due) for due in fired)]


_EXPIRING = Script(
    "expiring",
    "ProcessingTime",
    (
        Case("a", {0: "value.update((1,)); items.appendValue((1,)); entries.updateValue((1,), (1,))"}, []),
        Case("b", {2: "value.update((2,)); items.appendValue((2,)); entries.updateValue((2,), (2,))"}, []),
    ),
    micro_batches=6,
    ttl_ms=2000,
)


@by_engine(ours(8))
def test_tl5_what_has_expired_is_removed(engine: ProcessorEngine, run_on: Open) -> None:
    """TL5: of all kinds, by micro-batches without data, and from what is read from outside."""
    with run_on(engine) as on:
        on.feed(_EXPIRING.rows(0))
        frame = on.source(INPUT, delay=None)
        processor = Scripted(engine.api, {}, _EXPIRING.ttl_ms)
        transformed = engine.transform(frame, ["key"], processor, OUTPUT, "append", "processingTime")
        query = ClockedQuery(transformed, on.folder / "query", now_ms(0))
        try:
            query.micro_batch()
            for number in range(1, _EXPIRING.micro_batches):
                if number == 2:
                    on.feed(_EXPIRING.rows(number))
                query.tick(now_ms(number))
                if number == 3:
                    stored = {table: keys_of(on, table) for table in ("v.value", "l.items", "m.entries")}
        finally:
            query.query.stop()
        assert stored == {key: ["b"] for key in stored}
        assert [keys_of(on, table) for table in stored] == [[], [], []]


@pytest.mark.all
@by_engine(engines(9))
def test_tl7_another_ttl_at_a_restart(engine: ProcessorEngine, run_on: Open) -> None:
    """TL7: what was written keeps its time; what is written now has the new one. TL8: `read_state` shows both."""
    with run_on(engine) as on:
        notes = {}
        for first, ttl_ms in ((0, 5000), (1, 2000)):
            on.feed([("b", 0, "")] if first else [("a", 0, "value.update((1,))")])
            frame = engine.transform(
                on.source(INPUT, delay=None),
                ["key"],
                Scripted(engine.api, {}, ttl_ms),
                OUTPUT,
                "append",
                "processingTime",
            )
            query = ClockedQuery(frame, on.folder / "query", now_ms(first))
            try:
                query.micro_batch()
                if first:
                    on.feed([("b", 0, "value.update((2,))")])
                    query.tick(now_ms(2))
                    if not engine.is_spark:
                        shown = holdfast.read_state(on.session, on.folder / "query", OPERATOR, table="v.value")
                        assert {row["key"]: row["expires_ms"] for row in shown.to_pylist()} == {
                            "a": 15_000,
                            "b": 14_000,
                        }
                    for number in (3, 4, 5):
                        on.feed([("a", 0, "?value.get()"), ("b", 0, "?value.get()")])
                        notes[number] = dict(query.tick(now_ms(number)))
            finally:
                query.query.stop()
    assert [(found["a"], found["b"]) for found in notes.values()] == [
        ("rows (1,)", "rows (2,)"),
        ("rows (1,)", "rows None"),
        ("rows None", "rows None"),
    ]


def _waits_and_expires(key: Any, rows: Any, processor: Calling) -> Any:
    processor.handle.registerTimer(1)
    return [processor.emit("rows", key[0])]


@by_engine(engines(10))
def test_w6_a_query_with_processing_time_ends_without_batches_of_no_data(engine: ProcessorEngine, run_on: Open) -> None:
    """W6, Q26: else it would run on for ever. What is due then waits for the next rows."""

    def again(key: Any, due_ms: int, processor: Calling) -> Any:
        processor.handle.registerTimer(due_ms + 1)
        return [processor.emit("timer", f"{key[0]} {due_ms}")]

    with run_on(engine, **{"spark.sql.streaming.noDataMicroBatches.enabled": "false"}) as on:
        for key in ("a", "b"):
            on.feed_table(pa.table({"k": [key]}))
            processor = Calling(engine.api, _waits_and_expires, again)
            source = on.source("k string", delay=None)
            on.run(engine.transform(source, ["k"], processor, SHOWN, "append", "processingTime"), "append")
        assert [sorted(rows) for rows in on.batches] == [
            [("rows", "a"), ("timer", "a 1")],
            [("rows", "b"), ("timer", "a 2"), ("timer", "b 1")],
        ]


class _Expiring(Calling):
    """Its values live for a millisecond."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.value = handle.getValueState("brief", "n int", 1)


@by_way(ways(7, batch_only=True))
def test_b3_nothing_expires_in_a_batch_query(way: Way, run: Run) -> None:
    """B3, TL2: its time stands still."""

    def writes(key: Any, rows: Any, processor: Calling) -> Any:
        processor.value.update((1,))
        processor.handle.registerTimer(0)
        time.sleep(0.005)
        return [processor.emit("rows", processor.value.get())]

    def reads(key: Any, due_ms: int, processor: Calling) -> Any:
        return [processor.emit("timer", processor.value.get())]

    processor = _Expiring(way.api, writes, reads)
    shown = run(way, pa.table({"k": ["a"]}), "k string", ["k"], processor, SHOWN, "processingTime")
    assert shown == [("rows", "(1,)"), ("timer", "(1,)")]


def keys_of(on: Trial, table: str) -> list[str]:
    """Return the keys that have rows in a table."""
    return holdfast.read_state(on.session, on.folder / "query", OPERATOR, table=table).column("key").to_pylist()
