"""Sessions: the clicks of a user, none of them more than half an hour after the one before.

::

    python -m holdfast.examples.stateful.sessions

prints each session in the micro-batch in which it is over, by a `StatefulProcessor` and for all users of a shard at
once::

    micro-batch 3: {'user': 'ann', 'first_ms': 1772442000000, 'last_ms': 1772444400000, 'clicks': 3}

Clicks come out of order: ann's of 9:20 comes last, and makes one session of two. So a session is over only when no
click can join it any more: when the watermark, which is ten minutes behind the newest click, has passed its last click
by half an hour. Until then a user may have several open sessions. Clicks behind the watermark are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.examples.stateful.entries import set_earliest, store_entries, stored_entries
from holdfast.examples.stateful.local import MicroBatch, at, run_both

CLICKS = "user string, at timestamp"
SESSION = "first_ms long, last_ms long, clicks long"
SESSIONS = f"user string, {SESSION}"
STATE = "open array<struct<first_ms: long, last_ms: long, clicks: long>>"
GAP_MS = 30 * 60_000


class Sessions(StatefulProcessor):
    """Keeps a user's open sessions in a list; a timer ends each."""

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
    """Return the sessions of each user, by key."""
    users = holdfast.stream(_timed(clicks)).groupBy("user")
    return users.transformWithState(Sessions(), SESSIONS, "append", "EventTime", name="sessions")


def sessions_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Sort the open sessions and the clicks of all users together, and cut where the gap is too long."""
    at_ms, ones = batch.rows["at_ms"], np.ones(batch.rows.num_rows, np.int64)
    clicks = pa.table([at_ms, at_ms, ones, batch.groups.index], names=["first_ms", "last_ms", "clicks", "key"])
    parts = pa.concat_tables([stored_entries(batch, "open"), clicks])
    parts = parts.sort_by([("key", "ascending"), ("first_ms", "ascending")])
    key, first_ms, last_ms, n = (parts[name].to_numpy() for name in ("key", "first_ms", "last_ms", "clicks"))
    last_so_far_ms = pd.Series(last_ms).groupby(key).cummax().to_numpy()
    is_first = np.ones(len(parts), np.bool_)
    is_first[1:] = (key[1:] != key[:-1]) | (first_ms[1:] - last_so_far_ms[:-1] > GAP_MS)
    begins = np.flatnonzero(is_first)
    sessions = pa.table(
        {
            "first_ms": first_ms[begins],
            "last_ms": np.maximum.reduceat(last_ms, begins),
            "clicks": np.add.reduceat(n, begins),
            "key": key[begins],
        }
    )
    ends_ms = sessions["last_ms"].to_numpy() + GAP_MS
    is_over = ends_ms <= batch.watermark_ms
    store_entries(batch, "open", sessions.filter(~is_over))
    set_earliest(batch, key[begins][~is_over], ends_ms[~is_over])
    over = sessions.filter(is_over)
    return over.drop_columns(["key"]).append_column("user", batch.keys["user"].take(over["key"]))


def vectorised_sessions(clicks: DataFrame) -> DataFrame:
    """Return the same, for all users of a shard at once."""
    users = holdfast.stream(_timed(clicks)).groupBy("user")
    return users.applyInArrowWithState(
        sessions_of_shard, SESSIONS, STATE, "append", name="sessions", timeMode="EventTime"
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
    """Run both forms."""
    run_both(sessions, vectorised_sessions, CLICKS, BATCHES)


if __name__ == "__main__":
    main()
