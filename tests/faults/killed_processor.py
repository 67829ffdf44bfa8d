"""A driver process that is made to be killed: a processor with a value, a list, a map, TTL and timers, and a file sink.

Started as `tests.faults.killed_driver` is. A query has TTL or timers of event time, not both: its time mode decides.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import holdfast
from tests.faults.killed_driver import Job, start_spark
from tests.spark.processors.engines import NEEDED

if TYPE_CHECKING:
    from pyspark.sql.streaming import StatefulProcessorHandle
    from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

OPERATOR = "visits"
INPUT = "user long, amount long, seq long, at timestamp"
OUTPUT = "what string, user long, time_ms long, due_ms long, n long, amount long, seen string, kinds string"
DELAY = "5 seconds"
# Of processing time. Micro-batches take a second or two and a new driver ten or more, so some states expire while a
# user stays, and others when the driver was killed.
TTL_MS = {"total": 8_000, "seen": 3_000, "kinds": 60_000}
# A user is idle so long after the last row, and gone so long after that; by the time mode.
IDLE_MS = {"ProcessingTime": 1_500, "EventTime": 15_000}
GONE_MS = {"ProcessingTime": 2_000, "EventTime": 8_000}
SEEN_MAX = 30


@dataclass(frozen=True)
class ProcessorJob(Job):
    """A `Job` in one of the time modes."""

    time_mode: str = "ProcessingTime"


class Visits(StatefulProcessor):
    """Keeps a user's total, latest rows and rows by kind; tells when a user is idle, and forgets one who is gone."""

    def __init__(self, time_mode: str) -> None:
        self._time_mode = time_mode

    def init(self, handle: StatefulProcessorHandle) -> None:
        ttl_ms: dict[str, int] = TTL_MS if self._time_mode == "ProcessingTime" else {}
        self._handle = handle
        self._total = handle.getValueState("total", "n long, amount long", ttl_ms.get("total"))
        self._seen = handle.getListState("seen", "row long", ttl_ms.get("seen"))
        self._kinds = handle.getMapState("kinds", "kind long", "n long", ttl_ms.get("kinds"))

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        # Spark promises no order of a key's rows.
        found = sorted(rows, key=lambda row: row.seq)
        n, amount = self._total.get() or (0, 0)
        self._total.update((n + len(found), amount + sum(row.amount for row in found)))
        self._seen.appendList([(row.seq,) for row in found])
        seen = list(self._seen.get())
        if len(seen) > SEEN_MAX:
            self._seen.put(seen[-SEEN_MAX // 2 :])
        for row in found:
            self._count(row.amount)
        self._wait_for(found, timerValues)
        yield self._told("rows", key, timerValues)

    def _count(self, amount: int) -> None:
        kind = (amount % 5,)
        if amount % 7 == 0:
            self._kinds.removeKey(kind)
        else:
            counted = self._kinds.getValue(kind)
            self._kinds.updateValue(kind, (1 if counted is None else counted[0] + 1,))

    def _wait_for(self, found: list[Row], times: TimerValues) -> None:
        """Move the user's timer behind the last row."""
        last_ms = times.getCurrentProcessingTimeInMs()
        if self._time_mode == "EventTime":
            last_ms = max(round(row.at.timestamp() * 1000) for row in found)
        for due_ms in list(self._handle.listTimers()):
            self._handle.deleteTimer(due_ms)
        self._handle.registerTimer(last_ms + IDLE_MS[self._time_mode] + found[-1].seq % 500)

    def handleExpiredTimer(
        self, key: tuple[Any, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        due_ms = expiredTimerInfo.getExpiryTimeInMs()
        counted = self._kinds.getValue((-1,))
        yield self._told("idle" if counted is None else "gone", key, timerValues, due_ms)
        if counted is None:
            self._kinds.updateValue((-1,), (due_ms,))
            self._handle.registerTimer(due_ms + GONE_MS[self._time_mode])
        else:
            self._total.clear()
            self._seen.clear()
            self._kinds.clear()

    def _told(self, what: str, key: tuple[Any, ...], times: TimerValues, due_ms: int | None = None) -> Row:
        n, amount = self._total.get() or (None, None)
        return Row(
            what=what,
            user=key[0],
            time_ms=times.getCurrentProcessingTimeInMs(),
            due_ms=due_ms,
            n=n,
            amount=amount,
            seen=repr(list(self._seen.get())),
            kinds=repr(sorted(self._kinds.iterator())),
        )


def main() -> None:
    job = ProcessorJob(**json.loads(sys.argv[1]))
    spark = start_spark(job)
    for setting, value in NEEDED.items():
        spark.conf.set(setting, value)
    # Else a query with processing time runs micro-batches without data for ever.
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", job.time_mode == "EventTime")
    source = spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1)
    events = source.parquet(str(job.path / "input"))
    if job.time_mode == "EventTime":
        events = events.withWatermark("at", DELAY)
    visits = (
        holdfast.stream(events)
        .groupBy("user")
        .transformWithState(Visits(job.time_mode), OUTPUT, "append", job.time_mode, name=OPERATOR)
    )
    writer = visits.writeStream.format("parquet").option("path", str(job.path / "output")).outputMode("append")
    writer.option("checkpointLocation", str(job.path / "query")).trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
