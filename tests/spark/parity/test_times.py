"""Late rows, micro-batches without data, and what stands before and after the operator: on Spark's and on ours."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F  # noqa: N812

from tests.spark.parity import program
from tests.spark.parity.engines import (
    FILESYSTEM,
    MEMORY,
    ROCKSDB,
    Engine,
    Open,
    Trial,
    engines,
    of_any_backend,
    of_rocksdb,
    of_runs,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.slow]

of_both = engines(ROCKSDB, FILESYSTEM, MEMORY)


def keys_called(run: Trial) -> list[set[str]]:
    """Return the keys that were called in each micro-batch."""
    return [{key for key, _ in rows} for rows in run.batches]


@of_any_backend
@pytest.mark.parametrize("timeout", ["EventTimeTimeout", "NoTimeout"])
def test_late_rows(engine: Engine, timeout: str, run_on: Open) -> None:
    """P3: a row is late up to and including the watermark of the micro-batch before, row by row, for event time alone.

    The watermarks are 0, 100, 200 and 400, and rows of one key may be late or not.
    """
    with run_on(engine) as run:
        run.feed([("a", 100, "")])
        run.feed([("a", 200, "")])
        times = (99, 100, 101, 150, 199, 200, 400)
        run.feed([*((f"at {ms}", ms, "watermark") for ms in times), ("mixed", 100, ""), ("mixed", 101, "")])
        run.feed([(f"at {ms}", ms, "watermark") for ms in (199, 200, 201, 399)])
        run.run(run.apply(run.source(), ["key"], program.interpret, program.OUTPUT, program.STATE, "update", timeout))
        called = keys_called(run)
        notes = [dict(rows) for rows in run.batches]
    if timeout == "NoTimeout":
        assert called[2] == {"mixed", *(f"at {ms}" for ms in times)}
        assert called[3] == {f"at {ms}" for ms in (199, 200, 201, 399)}
        assert notes[2]["mixed"] == "data [7, 8], new None | new None"
    else:
        assert called[2] == {"mixed", *(f"at {ms}" for ms in (101, 150, 199, 200, 400))}
        assert called[3] == {"at 201", "at 399"}
        assert notes[2]["mixed"] == "data [8], new None | new None"
    assert notes[2]["at 150"].split(" | ")[1] == "watermark: 200"


@of_both
def test_a_timeout_that_stays_while_the_watermark_stands_still(engine: Engine, run_on: Open) -> None:
    """P7: what has fired and does nothing fires in every micro-batch, beside other rows and where all are late."""
    with run_on(engine) as run:
        run.feed([(f"{i}@", 1000, "timestamp 1500") for i in range(4)])
        for _ in range(3):
            run.feed([("clock", 2000, "")])
        run.run(
            run.apply(
                run.source(), ["key"], program.interpret, program.OUTPUT, program.STATE, "update", "EventTimeTimeout"
            )
        )
        fired = {f"{i}@" for i in range(4)}
        assert keys_called(run) == [fired, {"clock"}, {"clock", *fired}, fired]
        assert run.state() == dict.fromkeys(fired, (None, 1500))


@of_any_backend
def test_watermark_with_a_delay(engine: Engine, run_on: Open) -> None:
    """P2, P3, G7: timeouts and late rows go by the watermark, which is the delay behind the newest row."""
    with run_on(engine) as run:
        run.feed([("a@watermark;remove", 10_000, "update 1;timestamp 9500"), ("early", 2_000, "watermark")])
        run.feed([("b", 15_000, "watermark"), ("late?", 4_000, "watermark")])
        run.feed([("b", 16_000, "watermark"), ("late", 4_000, "watermark")])
        frame = run.source(delay="5 seconds")
        run.run(
            run.apply(frame, ["key"], program.interpret, program.OUTPUT, program.STATE, "update", "EventTimeTimeout")
        )
        notes = [dict(rows) for rows in run.batches]
    assert [set(found) for found in notes] == [
        {"a@watermark;remove", "early"},
        {"b", "late?"},
        {"a@watermark;remove", "b"},
        set(),
    ]
    assert notes[2]["a@watermark;remove"].endswith("watermark: 10000 | remove: None | new None")


@of_any_backend
def test_event_time_in_a_window(engine: Engine, run_on: Open) -> None:
    """P3: a window carries the watermark too, and is late when its end is."""
    with run_on(engine) as run:
        for ms in (1000, 5000, 12_000):
            run.feed([("a", ms, "watermark"), ("late?", 500, "")])
        run.feed([("b", 13_000, ""), ("late?", 500, "")])
        frame = run.source().withColumn("at", F.window("at", "2 seconds"))
        run.run(
            run.apply(frame, ["key"], program.interpret, program.OUTPUT, program.STATE, "update", "EventTimeTimeout")
        )
        called = keys_called(run)
    assert [sorted(keys) for keys in called if keys] == [*[["a", "late?"]] * 3, ["b"]]


@of_both
@pytest.mark.live
def test_processing_time_fires_without_data(engine: Engine, run_on: Open, tmp_path: Path) -> None:
    """P4: with processing time a micro-batch comes by itself, and what is due fires in it."""
    fired: list[tuple[str, str]] = []
    committed = threading.Event()

    def collect(rows: DataFrame, _: int) -> None:
        if len(fired) == 2:
            committed.set()  # as the micro-batch before this one is
        fired.extend((key, note) for key, note in rows.collect() if note.startswith("timeout"))

    with run_on(engine) as run:
        run.feed(
            [
                ("a@remove", 1, "update 1;duration 1"),
                ("b@get;remove", 1, "update 2;duration 1500"),
                ("c@", 1, "update 3"),
            ]
        )
        arguments = (program.interpret, program.OUTPUT, program.STATE, "update", "ProcessingTimeTimeout")
        frame = run.apply(run.source(), ["key"], *arguments)
        writer = frame.writeStream.foreachBatch(collect).outputMode("update")
        query = writer.option("checkpointLocation", str(run.folder / "query")).start()
        try:
            committed.wait(120)
        finally:
            query.stop()
        assert [key for key, _ in sorted(fired)] == ["a@remove", "b@get;remove"]
        assert fired[-1][1].split(" | ")[:2] == ["timeout ['key', 'at', 'v', 'do'] 0, exists (2,)", "get: (2,)"]
        assert run.state() == {"c@": ((3,), None)}


@of_runs
def test_an_aggregation_after_it(engine: Engine, run_on: Open) -> None:
    """P5: a function in append mode may be followed by an aggregation."""
    with run_on(engine) as run:
        run.feed([("a", 1, "increase"), ("b", 1, "increase")])
        run.feed([("a", 2, "increase"), ("c", 2, "increase")])
        arguments = (program.interpret, program.OUTPUT, program.STATE, "append", "NoTimeout")
        counted = run.apply(run.source(delay=None), ["key"], *arguments).groupBy("key").count()
        run.run(counted)
        assert [dict(rows) for rows in run.batches] == [{"a": 1, "b": 1}, {"a": 2, "c": 1}]


@of_rocksdb
def test_a_union_does_not_shift_its_partitions(engine: Engine, run_on: Open) -> None:
    """P6: behind another input with partitions of its own each key finds its state again (SPARK-29438)."""
    with run_on(engine) as run:
        for number in range(2):
            run.feed([(key, number, "increase") for key in "abcdefgh"])
        arguments = (program.interpret, program.OUTPUT, program.STATE, "append", "NoTimeout")
        other = run.source(delay=None).select("key", F.lit("other").alias("note")).repartition(3)
        run.run(other.union(run.apply(run.source(delay=None), ["key"], *arguments)), "append")
        seen = [{key: note[-4:] for key, note in rows if note != "other"} for rows in run.batches]
        assert seen == [dict.fromkeys("abcdefgh", "(1,)"), dict.fromkeys("abcdefgh", "(2,)")]
