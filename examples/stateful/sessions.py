"""Sessions: a user's clicks with gaps of at most half an hour.

::

    python -m holdfast.examples.stateful.sessions

prints each session when it has ended, by a `StatefulProcessor` and vectorised; `sessions_by_operator` does the same
with an operator::

    micro-batch 3: {'user': 'ann', 'first_ms': 1772442000000, 'last_ms': 1772444400000, 'clicks': 3}

Clicks arrive out of order: ann's click of 9:20 arrives last and joins two sessions. So a session ends only when no more
click can join it: when the watermark, ten minutes behind the newest click, is half an hour past its last click. Until
then a user may have several open sessions. Clicks behind the watermark are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.examples.stateful.entries import store_entries, with_keys, with_stored
from holdfast.examples.stateful.local import MicroBatch, at, run_both

CLICKS = "user string, at timestamp"
SESSION = "first_ms long, last_ms long, clicks long"
SESSIONS = f"user string, {SESSION}"
STATE = "open array<struct<first_ms: long, last_ms: long, clicks: long>>"
GAP_MS = 30 * 60_000


class Sessions(StatefulProcessor):
    """Keeps a user's open sessions in a list, each with a timer for its end."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.open = handle.getListState("open", SESSION)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        parts = sorted([*self.open.get(), *((row.at_ms, row.at_ms, 1) for row in rows)])
        merged = parts[:1]
        for first_ms, last_ms, clicks in parts[1:]:
            before = merged[-1]
            if first_ms - before[1] <= GAP_MS:
                merged[-1] = (before[0], max(before[1], last_ms), before[2] + clicks)
            else:
                merged.append((first_ms, last_ms, clicks))
        self.open.put(merged)
        for _, last_ms, _ in merged:
            self.handle.registerTimer(last_ms + GAP_MS)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        last_ms = expiredTimerInfo.getExpiryTimeInMs() - GAP_MS
        sessions = list(self.open.get())
        still_open = [session for session in sessions if session[1] > last_ms]
        if len(still_open) == len(sessions):
            return  # a later click has joined the session of this timer
        self.open.clear()
        if still_open:
            self.open.put(still_open)
        for session in sessions[: len(sessions) - len(still_open)]:
            yield Row(user=key[0], first_ms=session[0], last_ms=session[1], clicks=session[2])


def sessions(clicks: DataFrame) -> DataFrame:
    users = holdfast.stream(_timed(clicks)).groupBy("user")
    return users.transformWithState(Sessions(), SESSIONS, "append", "EventTime", name="sessions")


def sessions_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Sort the open sessions and clicks of all users together, and split them at gaps that are too long."""
    clicks = pd.DataFrame(dict.fromkeys(["first_ms", "last_ms"], batch.rows["at_ms"].to_numpy())).assign(clicks=1)
    parts = with_stored(batch, "open", clicks).sort_values(["key", "first_ms"])
    last_ms = parts.groupby("key")["last_ms"].cummax().shift()
    begins = parts["key"].diff().ne(0) | (parts["first_ms"] - last_ms > GAP_MS)
    found = parts.groupby(begins.cumsum()).agg({"first_ms": "first", "last_ms": "max", "clicks": "sum", "key": "first"})
    left = found[found["last_ms"] + GAP_MS > batch.watermark_ms]
    store_entries(batch, "open", left, due_ms=left["last_ms"] + GAP_MS)
    return with_keys(batch, found.drop(left.index))


def vectorised_sessions(clicks: DataFrame) -> DataFrame:
    users = holdfast.stream(_timed(clicks)).groupBy("user")
    return users.applyInArrowWithState(
        sessions_of_shard, SESSIONS, STATE, "append", name="sessions", timeMode="EventTime"
    )


def sessions_by_operator(clicks: DataFrame) -> DataFrame:
    """Return the same sessions with times as timestamps."""
    users = holdfast.stream(clicks.withWatermark("at", "10 minutes")).groupBy("user")
    return users.session("at", "30 minutes").agg(
        first=holdfast.min("at"), last=holdfast.max("at"), clicks=holdfast.count()
    )


def _timed(clicks: DataFrame) -> DataFrame:
    return clicks.withWatermark("at", "10 minutes").withColumn("at_ms", F.unix_millis("at"))


BATCHES: list[MicroBatch] = [
    [("ann", at(9, 0)), ("bob", at(9, 5)), ("ann", at(9, 40))],
    [("ann", at(9, 20)), ("bob", at(9, 46))],
    [("cem", at(10, 25))],
    [("bob", at(9, 50)), ("cem", at(11, 30))],
]


def main() -> None:
    run_both(sessions, vectorised_sessions, CLICKS, BATCHES)


if __name__ == "__main__":
    main()
