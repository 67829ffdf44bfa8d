"""Queries that are ended for good: all that is due up to the end of time is shown once, and no input is lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.readwriter import DataStreamWriter

from holdfast import savepoints, sinks
from holdfast.examples.stateful import sessions
from holdfast.sinks import TwoPhaseSink
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.spark.savepoints.sink_queries import Unanswered
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.slow(40)]

BEGIN = datetime(2026, 3, 2, 9, tzinfo=UTC)
BEGIN_MS = int(BEGIN.timestamp()) * 1000
SCHEMA = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
QUERIES: list[Callable[[DataFrame], DataFrame]] = [sessions.vectorised_sessions, sessions.sessions]
FIRST = [[("ann", 0), ("ann", 10), ("ann", 20), ("bob", 5)], [("ann", 60), ("cid", 61)]]
LATER = [[("ann", 62)], [("end", 10_000)]]
CLOSED = [("ann", 0, 20, 3), ("ann", 60, 60, 1), ("bob", 5, 5, 1), ("cid", 61, 61, 1)]


def feed(lab: Lab, *files: list[tuple[str, int]]) -> None:
    """Add clicks, so many minutes after the begin."""
    for file in files:
        rows = [{"user": user, "at": BEGIN + timedelta(minutes=minutes)} for user, minutes in file]
        lab.feed(pa.Table.from_pylist(rows, SCHEMA))


def writer(lab: Lab, query: Callable[[DataFrame], DataFrame], sink: TwoPhaseSink, name: str) -> DataStreamWriter:
    frame = query(lab.source(sessions.CLICKS)).writeStream.outputMode("append").trigger(availableNow=True)
    return frame.foreachBatch(sinks.exactly_once(sink)).option("checkpointLocation", str(lab.folder / name))


def shown(url: str) -> list[tuple[Any, ...]]:
    """Return each session's user, first and last click in minutes, and clicks."""
    rows = pa.concat_tables(map(pq.read_table, sinks.parquet_files(url))).to_pylist()
    minutes = [[(row[name] - BEGIN_MS) // 60_000 for name in ("first_ms", "last_ms")] for row in rows]
    return sorted((row["user"], *of, row["clicks"]) for row, of in zip(rows, minutes, strict=True))


def drained(lab: Lab, last: DataStreamWriter, name: str = "end", **more: Any) -> savepoints.Savepoint:
    return savepoints.drain(lab.spark, None, last, lab.folder / "query", lab.folder / "savepoints", name, **more)


@pytest.mark.parametrize("query", cases(QUERIES, quick=1))
def test_all_is_shown_once_and_a_restored_query_reads_what_was_left(
    lab: Lab, query: Callable[[DataFrame], DataFrame]
) -> None:
    """Sessions that are open are closed; a click that has come meanwhile is not read, and later not late."""
    sink = sinks.parquet("out", url := str(lab.folder / "shown"))
    feed(lab, *FIRST)
    with configured(lab.spark, dict(NEEDED)):
        writer(lab, query, sink, "query").start().awaitTermination()
        assert set(shown(url)) < set(CLOSED)
        feed(lab, LATER[0])
        made = drained(lab, writer(lab, query, sink, "query"))
        assert shown(url) == CLOSED
        assert made.query.next_watermark_ms == BEGIN_MS + 51 * 60_000, "that of the query, before"
        assert not (lab.folder / "query-draining").exists()
        with pytest.raises(StreamingQueryException, match="planned this micro-batch again"):
            writer(lab, query, sink, "query").start().awaitTermination()
        savepoints.restore(lab.spark, lab.folder / "savepoints", "end", lab.folder / "again", continue_sinks=True)
        feed(lab, LATER[1])
        writer(lab, query, sink, "again").start().awaitTermination()
    assert shown(url) == sorted([*CLOSED, ("ann", 62, 62, 1)])


@pytest.mark.all
def test_windows_of_sparks_own_are_closed(lab: Lab) -> None:
    """The watermark is Spark's: whatever waits for it gives out what it has."""
    sink = sinks.parquet("out", url := str(lab.folder / "shown"))

    def with_windows(clicks: DataFrame) -> DataFrame:
        window = F.window("at", "30 minutes")
        timed = lab.source(sessions.CLICKS).withWatermark("at", "10 minutes")
        counted = timed.groupBy("user", window).agg(F.count("*").alias("clicks"))
        times = [
            F.unix_millis(f"window.{end}").alias(f"{name}_ms") for end, name in (("start", "first"), ("end", "last"))
        ]
        return sessions.vectorised_sessions(clicks).union(counted.select("user", *times, "clicks"))

    feed(lab, *FIRST)
    writer(lab, with_windows, sink, "query").start().awaitTermination()
    drained(lab, writer(lab, with_windows, sink, "query"), without=["stateStoreSave"])
    assert shown(url) == sorted([*CLOSED, ("ann", 0, 30, 3), ("ann", 60, 90, 1), ("bob", 0, 30, 1), ("cid", 60, 90, 1)])


@pytest.mark.all
def test_what_was_stopped_half_way_goes_on(lab: Lab) -> None:
    """The target does not answer when the last micro-batch is decided: it is shown by the next attempt, once."""
    query, sink = QUERIES[0], sinks.parquet("out", url := str(lab.folder / "shown"))
    feed(lab, *FIRST)
    running = writer(lab, query, sink, "query").start()
    running.awaitTermination()
    before = shown(url)
    last = max(int(path.name) for path in (lab.folder / "query/commits").glob("[0-9]*"))
    failing = writer(lab, query, Unanswered(sink, "no such folder", last + 1), "query")
    with pytest.raises(StreamingQueryException, match="the target does not answer"):
        savepoints.drain(lab.spark, running, failing, lab.folder / "query", lab.folder / "savepoints", "end")
    assert shown(url) == before
    for name in ("end", "again"):
        drained(lab, writer(lab, query, sink, "query"), name)
        assert shown(url) == CLOSED
