"""Queries of each API and clock whose timers are overdue when they have run one micro-batch, exactly."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from tests.spark.conftest import Lab
from tests.spark.processors.engines import NEEDED
from tests.spark.savepoints.queries import rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

Clock = Literal["EventTime", "ProcessingTime"]
OUT = "key string, n long, is_due boolean"
HOUR_MS = 3_600_000
DUE_MS = 5_000
KEYS = "abcdefgh"


def vectorised(clock: Clock) -> Any:
    def wait(batch: holdfast.ShardBatch) -> pa.Table:
        n = pc.add(pc.coalesce(batch.states["counts"].get()["n"], 0), batch.groups.count())
        has_rows = pc.greater(batch.groups.count(), 0)
        for table in batch.states:
            batch.states[table].put(n=n, where=has_rows)
        due_ms = DUE_MS if clock == "EventTime" else batch.processing_ms + 1
        is_due = pc.is_valid(batch.timers.due_ms)
        batch.timers.set([due_ms] * batch.keys.num_rows, where=has_rows)
        return batch.keys.append_column("n", n).append_column("is_due", is_due)

    return wait


class Waiting(StatefulProcessor):
    """Counts rows, and gives a key out when its timer is due; an initial row counts ten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._counts = handle.getValueState("counts", "n long")
        expires = self._clock == "ProcessingTime"  # as Spark wants it
        self._kept = handle.getMapState("kept", "i int", "n long", ttlDurationMs=HOUR_MS if expires else None)
        self._lost = handle.getListState("lost", "n long", ttlDurationMs=1 if expires else None)

    def _count(self, n: int) -> int:
        n += (self._counts.get() or (0,))[0]
        self._counts.update((n,))
        self._kept.updateValue((n,), (n,))
        self._lost.appendValue((n,))
        return n

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        self._count(initialState.n)
        self._set_timer(timerValues)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = self._count(sum(1 for _ in rows))
        self._set_timer(timerValues)
        yield Row(key=key[0], n=n, is_due=False)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=key[0], n=self._counts.get()[0], is_due=True)

    def _set_timer(self, timerValues: Any) -> None:
        now_ms = timerValues.getCurrentProcessingTimeInMs() if self._clock == "ProcessingTime" else DUE_MS - 1
        self._handle.registerTimer(now_ms + 1)


def by_key(clock: Clock) -> Any:
    def wait(key: tuple[str], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = (state.getOption or (0,))[0] + sum(map(len, chunks))
        state.update((n,))
        is_due = state.hasTimedOut
        if clock == "ProcessingTime":
            state.setTimeoutDuration(HOUR_MS if is_due else 1)
        elif not is_due:
            state.setTimeoutTimestamp(max(DUE_MS, state.getCurrentWatermarkMs() + 1))
        yield pd.DataFrame({"key": [key[0]], "n": [n], "is_due": [is_due]})

    return wait


@dataclass(frozen=True)
class Case:
    """An API and a clock."""

    api: str
    clock: Clock
    #: Whose rows are compared: the second one's rows live for an hour, the third one's for no time.
    tables: tuple[str, ...]
    #: With an initial state.
    begins: bool = False

    def __str__(self) -> str:
        return f"{self.api}, {self.clock}{', with an initial state' * self.begins}"

    @property
    def settings(self) -> dict[str, str]:
        return NEEDED if self.api == "processor" else {}

    def query(self, source: DataFrame) -> DataFrame:
        grouped = holdfast.stream(source.withWatermark("at", "0 seconds")).groupBy("key")
        if self.api == "vectorised":
            states = {
                "counts": "n long",
                "kept": holdfast.StateTable("n long", ttlDurationMs=HOUR_MS),
                "lost": holdfast.StateTable("n long", ttlDurationMs=1),
            }
            return grouped.applyInArrowWithState(
                vectorised(self.clock), OUT, states, "append", name="waiting", timeMode=self.clock
            )
        if self.api == "by key":
            return grouped.applyInPandasWithState(
                by_key(self.clock), OUT, "n long", "append", f"{self.clock}Timeout", name="waiting"
            )
        initial = None
        if self.begins:
            initial = source.sparkSession.createDataFrame([("a", 10), ("i", 10)], "key string, n long").groupBy("key")
        return grouped.transformWithState(
            Waiting(self.clock), OUT, "append", self.clock, initialState=initial, name="waiting"
        )


CLOCKS: list[Clock] = ["EventTime", "ProcessingTime"]
TABLES = ("counts", "kept", "lost")
CASES = [
    *(Case("vectorised", clock, TABLES) for clock in CLOCKS),
    *(Case("by key", clock, ("state",)) for clock in CLOCKS),
    *(Case("processor", clock, TABLES, begins) for clock in CLOCKS for begins in (False, True)),
]


def feed(lab: Lab, keys: str, second: int) -> None:
    at = pa.array([dt.datetime.fromtimestamp(second, dt.UTC)] * len(keys), pa.timestamp("us", "UTC"))
    lab.feed(pa.table({"key": list(keys), "at": at}))


def run_once(lab: Lab, case: Case, query: str, durable: str, source: DataFrame | None = None) -> list[str]:
    """Run exactly one micro-batch, which availableNow would not do in processing time; return its rows."""
    lab.configure({"state.dir": str(lab.folder / durable)})
    found: list[dict[str, Any]] = []
    frame = case.query(lab.source("key string, at timestamp") if source is None else source)
    writer = frame.writeStream.foreachBatch(lambda frame, _: found.extend(frame.toArrow().to_pylist()))
    writer = writer.outputMode("append").trigger(once=True).option("checkpointLocation", str(lab.folder / query))
    writer.start().awaitTermination()
    (sorted_rows,) = rows([found])
    return sorted_rows


def state(lab: Lab, case: Case, query: str, durable: str) -> dict[str, list[str]]:
    """Return the rows by table; with the times at which they expire, but for key z, which came later."""
    lab.configure({"state.dir": str(lab.folder / durable)})
    found = {}
    for table in case.tables:
        stored = holdfast.read_state(lab.spark, lab.folder / query, "waiting", table=table).to_pylist()
        found[table] = sorted(repr(row if row["key"] != "z" else row["n"]) for row in stored)
    return found
