"""A driver process that is made to be killed: sessions of users, ended by timeouts of event time, into a file sink.

Started as `tests.faults.killed_driver` is, with the same `Job`; below it, what must come of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd

import holdfast
from tests.faults.killed_driver import Job, start_spark

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

    from tests.faults.killings import MicroBatch

OPERATOR = "sessions"
GAP_MS = 15_000
DELAY = "5 seconds"
SESSION = "user long, n long, total long, last_ms long"

Session = tuple[int | None, int, int, int]


def close_sessions(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Count a user's rows until none has come for some time, then return the session and forget it."""
    n, total, last_ms = state.getOption or (0, 0, 0)
    if state.hasTimedOut:
        state.remove()
        user = pd.array([key[0]], "Int64")
        yield pd.DataFrame({"user": user, "n": [n], "total": [total], "last_ms": [last_ms]})
        return
    for rows in chunks:
        n, total = n + len(rows), total + int(rows["amount"].sum())
        last_ms = max(last_ms, rows["at"].max().value // 1_000_000)
    state.update((n, total, last_ms))
    state.setTimeoutTimestamp(max(last_ms + GAP_MS, state.getCurrentWatermarkMs()))


def expected(batches: list[MicroBatch]) -> tuple[dict[int | None, tuple[int, ...]], list[Session]]:
    """Compute, row by row, the open sessions at the end with their timeouts, and those that were closed."""
    from tests.faults.killings import rows_of

    open_sessions: dict[int | None, tuple[int, ...]] = {}
    closed: list[Session] = []
    late_ms = 0
    for batch in batches:
        watermark_ms = batch.watermark_ms
        for row in rows_of(batch):
            at_ms = round(row["at"].timestamp() * 1000)
            if at_ms > late_ms:
                n, total, last_ms, _ = open_sessions.get(row["user"], (0, 0, 0, 0))
                last_ms = max(last_ms, at_ms)
                due_ms = max(last_ms + GAP_MS, watermark_ms)
                open_sessions[row["user"]] = (n + 1, total + row["amount"], last_ms, due_ms)
        for user in [user for user, session in open_sessions.items() if session[3] < watermark_ms]:
            n, total, last_ms, _ = open_sessions.pop(user)
            closed.append((user, n, total, last_ms))
        # Rows are late by the watermark of the micro-batch before.
        late_ms = watermark_ms
    return open_sessions, closed


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    spark = start_spark(job)
    source = spark.readStream.schema("user long, amount long, at timestamp").option("maxFilesPerTrigger", 1)
    events = source.parquet(str(job.path / "input")).withWatermark("at", DELAY)
    sessions = (
        holdfast.stream(events)
        .groupBy("user")
        .applyInPandasWithState(
            close_sessions, SESSION, "n long, total long, last_ms long", "append", "EventTimeTimeout", name=OPERATOR
        )
    )
    writer = sessions.writeStream.format("parquet").option("path", str(job.path / "output")).outputMode("append")
    writer.option("checkpointLocation", str(job.path / "query")).trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
