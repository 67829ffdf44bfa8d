"""Stateful operators behind a processor, and the watermark that reaches them: items W8 to W13."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming import StatefulProcessor

import holdfast
from holdfast.errors import InvalidArgumentError
from tests.spark.answers import text_of
from tests.spark.parity.engines import Open, Trial
from tests.spark.processors.engines import BY_ROW, ProcessorEngine, by_engine, engines, later
from tests.spark.processors.showing import as_output
from tests.spark.processors.test_keys import ONE_PARTITION
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow(6)]

SCHEMA = "k string, at timestamp"
OUTPUT = "k string, n int, at timestamp"
CHAINED = {"eventTimeColumnName": "at"}


class Numbering(StatefulProcessor):
    """Numbers the rows of a key, and emits each with its own time, moved by some seconds."""

    def __init__(self, api: str, moved_s: int = 0) -> None:
        self._api, self._moved_s = api, moved_s

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n int")

    def handleInputRows(self, key: tuple[Any, ...], rows: Any, timerValues: Any) -> Any:
        times = [row.at for row in rows] if self._api == "row" else [at for frame in rows for at in frame["at"]]
        for at in sorted(times):
            (n,) = self._count.get() or (0,)
            self._count.update((n + 1,))
            moved = None if pd.isna(at) else at + dt.timedelta(seconds=self._moved_s)
            yield as_output(self._api, k=key[0], n=n + 1, at=moved)


def feed(on: Trial, *rows: tuple[str, int]) -> None:
    """Add the rows of a micro-batch: key and time in seconds."""
    columns = {
        "k": pa.array([k for k, _ in rows], pa.string()),
        "at": pa.array([1_000_000 * s for _, s in rows], pa.timestamp("us", "UTC")),
    }
    on.feed_table(pa.table(columns))


def numbered(
    on: Trial, engine: ProcessorEngine, frame: DataFrame | None = None, moved_s: int = 0, **named: Any
) -> DataFrame:
    """Return a frame with its rows numbered by key."""
    frame = on.source(SCHEMA) if frame is None else frame
    named = {"timeMode": "EventTime", **CHAINED, **named}
    return engine.transform(frame, ["k"], Numbering(engine.api, moved_s), OUTPUT, "append", **named)


def per_minute(frame: DataFrame) -> DataFrame:
    """Count rows by minute; a minute comes out when the watermark has passed it."""
    window = F.window("at", "60 seconds")
    counted = frame.groupBy(window).agg(F.count("*").alias("rows"), F.max("n").alias("most"))
    return counted.select(F.unix_seconds("window.start").alias("start"), "rows", "most")


@by_engine(engines(0))
@pytest.mark.parametrize("time_mode", [pytest.param("None", marks=pytest.mark.all), "EventTime"])
def test_w8_w9_a_window_behind_a_processor(engine: ProcessorEngine, time_mode: str, run_on: Open) -> None:
    """W8, W9: the output's column takes the watermark over, and a window ends by it."""
    with run_on(engine, **ONE_PARTITION) as on:
        feed(on, ("a", 10), ("a", 50), ("b", 70))
        feed(on, ("a", 130))
        feed(on, ("b", 400))
        on.run(per_minute(numbered(on, engine, timeMode=time_mode)), "append")
        assert sorted(row for rows in on.batches for row in rows) == [(0, 2, 2), (60, 1, 1), (120, 1, 3)]


@by_engine(engines(1))
def test_w9_two_processors_in_a_row(engine: ProcessorEngine, run_on: Open) -> None:
    """W9: in one query, by the watermark of the first; the second drops what is late for it."""
    with run_on(engine, **ONE_PARTITION) as on:
        for rows in ([("a", 10), ("b", 20)], [("a", 30)], [("a", 5), ("a", 100), ("b", 100)]):
            feed(on, *rows)
        named = {} if engine.is_spark else {"name": "second"}
        on.run(numbered(on, engine, numbered(on, engine), **named), "append")
        found = [[(k, n) for k, n, _ in rows] for rows in on.batches]
        assert [sorted(rows) for rows in found if rows] == [[("a", 1), ("b", 1)], [("a", 2)], [("a", 3), ("b", 2)]]
        if not engine.is_spark:
            shown = holdfast.read_state(on.session, on.folder / "query", "second", table="v.count").to_pylist()
            assert sorted(shown, key=str) == [{"k": "a", "n": 3}, {"k": "b", "n": 2}]


def seconds(column: str) -> Any:
    return F.unix_seconds(column).alias(column)


def deduplicated(frame: DataFrame, _: Trial) -> DataFrame:
    """Show the first row of each key; a key that is older than the watermark is forgotten."""
    return frame.dropDuplicatesWithinWatermark(["k"]).select("k", "n", seconds("at"))


def distinct(frame: DataFrame, _: Trial) -> DataFrame:
    """Show each time once."""
    return frame.dropDuplicates(["at"]).select(seconds("at"))


def joined(frame: DataFrame, on: Trial) -> DataFrame:
    """Join each row to rows of its key that are 20 to 60 seconds later; those without any come when none can come."""
    later = on.source(SCHEMA).select(F.col("k").alias("key"), F.col("at").alias("later"))
    is_later = F.expr("key = k AND later >= at + INTERVAL 20 SECONDS AND later <= at + INTERVAL 60 SECONDS")
    return frame.join(later, is_later, "left_outer").select("k", "n", seconds("at"), seconds("later"))


BEHIND: dict[Any, list[list[tuple[Any, ...]]]] = {
    deduplicated: [[("a", 1, 10), ("b", 1, 40)], [("c", 1, 400)], [("a", 4, 420)]],
    distinct: [[(10,), (40,)], [(60,), (70,)], [(400,)], [(420,), (430,)]],
    joined: [
        [("a", 1, 10, 40)],
        [("a", 1, 10, 60), ("a", 2, 40, 60), ("b", 1, 40, 70)],
        [("a", 3, 60, None), ("b", 2, 70, None), ("c", 1, 400, 430)],
    ],
}


@pytest.mark.all
@by_engine(engines(2))
@pytest.mark.parametrize("behind", cases(list(BEHIND)), ids=lambda behind: behind.__name__)
def test_w9_deduplication_and_joins_behind_a_processor(behind: Any, engine: ProcessorEngine, run_on: Open) -> None:
    """W9: the watermark reaches their state, and drops what is late and what is over, in the same micro-batches."""
    with run_on(engine, **ONE_PARTITION) as on:
        feed(on, ("a", 10), ("a", 40), ("b", 40))
        feed(on, ("a", 60), ("b", 70))
        feed(on, ("c", 400))
        feed(on, ("a", 420), ("c", 430))
        on.run(behind(numbered(on, engine), on), "append")
        found = [sorted(rows, key=str) for rows in on.batches if rows]
        assert found == BEHIND[behind]


@by_engine(engines(3))
def test_w10_without_the_column_nothing_can_stand_behind(engine: ProcessorEngine, run_on: Open) -> None:
    """W10: the query does not start."""
    with run_on(engine, **ONE_PARTITION) as on:
        feed(on, ("a", 10))
        with pytest.raises(AnalysisException, match=r"STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION"):
            on.run(per_minute(numbered(on, engine, eventTimeColumnName="")), "append")


@pytest.mark.all
@by_engine(engines(4))
def test_w12_rows_that_are_older_than_the_watermark_fail(engine: ProcessorEngine, run_on: Open) -> None:
    """W12: the watermark is that by which rows are late."""
    with run_on(engine, **ONE_PARTITION) as on:
        feed(on, ("a", 100))
        on.run(per_minute(numbered(on, engine, moved_s=-50)), "append")
        feed(on, ("a", 200))
        on.run(per_minute(numbered(on, engine)), "append")
        feed(on, ("a", 300))
        text = text_of(on.failure(per_minute(numbered(on, engine, moved_s=-200)), "append"))
        assert "EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED" in text


def test_w11_w13_columns_that_carry_no_watermark(run_on: Open) -> None:
    """W11, W13: Spark emits nothing for ever, or dies of a cast in the first micro-batch; an unknown column is its."""
    engine = BY_ROW[0]
    with run_on(engine, **ONE_PARTITION) as on:
        feed(on, ("a", 10))
        with pytest.raises(InvalidArgumentError, match="passes on no watermark"):
            numbered(on, engine, timeMode="ProcessingTime")
        with pytest.raises(InvalidArgumentError, match="must name a timestamp column"):
            numbered(on, engine, eventTimeColumnName="k")
        with pytest.raises(AnalysisException, match=r"UNRESOLVED_COLUMN.WITH_SUGGESTION"):
            numbered(on, engine, eventTimeColumnName="absent").schema  # noqa: B018
        with pytest.raises(AnalysisException, match="CANNOT_ASSIGN_EVENT_TIME_COLUMN_WITHOUT_WATERMARK"):
            numbered(on, engine, on.source(SCHEMA, delay=None), timeMode="None").schema  # noqa: B018


@by_engine(later())
def test_a_chain_after_a_restart(engine: ProcessorEngine, run_on: Open) -> None:
    """Both operators go on with their own state."""
    with run_on(engine, **ONE_PARTITION) as on:
        for rows in ([("a", 10)], [("a", 20)], [("a", 30), ("b", 40)]):
            feed(on, *rows)
            on.run(numbered(on, engine, numbered(on, engine), name="second"), "append")
        found = [(k, n) for rows in on.batches for k, n, _ in rows]
        assert sorted(found) == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
