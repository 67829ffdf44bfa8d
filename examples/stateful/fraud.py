"""Fraud: payments by card that nobody confirms.

::

    python -m holdfast.examples.stateful.fraud

prints an alert when the payments of a card that wait for their confirmation exceed 1,000.00, and when a payment has
waited for five minutes; by a `StatefulProcessor` and for all cards of a shard at once::

    micro-batch 3: {'card': 'c1', 'alert': 'not confirmed', 'payment': 'p1', 'cents': 40000}

The two halves of a payment may come in any order, so whichever comes first is kept and the other one takes it away. The
five minutes are event time: they are over when the watermark, one minute behind the newest row, says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.examples.stateful.entries import set_earliest, store_entries, stored_entries
from holdfast.examples.stateful.local import MicroBatch, at, run_both

# A payment has an amount, its confirmation has none.
EVENTS = "card string, payment string, cents long, at timestamp"
ALERTS = "card string, alert string, payment string, cents long"
STATE = "waiting array<struct<payment: string, cents: long, due_ms: long>>"
WAIT_MS = 5 * 60_000
LIMIT_CENTS = 100_000


class Watch(StatefulProcessor):
    """Keeps in a map what waits for its other half; each entry has a timer."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.waiting = handle.getMapState("waiting", "payment string", "cents long, due_ms long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if self.waiting.containsKey((row.payment,)):
                self.waiting.removeKey((row.payment,))
            else:
                due_ms = row.at_ms + WAIT_MS
                self.waiting.updateValue((row.payment,), (row.cents, due_ms))
                self.handle.registerTimer(due_ms)
        total = sum(cents or 0 for cents, _ in self.waiting.values())
        if total > LIMIT_CENTS:
            yield Row(card=key[0], alert="too much", payment=None, cents=total)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        for (payment,), (cents, due_ms) in self.waiting.iterator():
            if due_ms == expiredTimerInfo.getExpiryTimeInMs():
                self.waiting.removeKey((payment,))
                if cents is not None:
                    yield Row(card=key[0], alert="not confirmed", payment=payment, cents=cents)


def alerts(events: DataFrame) -> DataFrame:
    """Return the alerts of each card, by key."""
    cards = holdfast.stream(_timed(events)).groupBy("card")
    return cards.transformWithState(Watch(), ALERTS, "append", "EventTime", name="alerts")


def alerts_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Put what waits and what comes of all cards together; what is there once goes on waiting."""
    come = pa.table(
        {
            "payment": batch.rows["payment"],
            "cents": batch.rows["cents"],
            "due_ms": pc.add(batch.rows["at_ms"], WAIT_MS),
            "key": batch.groups.index,
        }
    )
    halves = pa.concat_tables([stored_entries(batch, "waiting"), come]).group_by(["key", "payment"], use_threads=False)
    found = halves.aggregate([("cents", "max"), ("due_ms", "min"), ("payment", "count")])
    waiting = found.filter(pc.equal(found["payment_count"], 1)).sort_by(
        [("key", "ascending"), ("payment", "ascending")]
    )
    waiting = waiting.select(["payment", "cents_max", "due_ms_min", "key"])
    waiting = waiting.rename_columns(["payment", "cents", "due_ms", "key"])

    is_due = pc.less_equal(waiting["due_ms"], batch.watermark_ms)
    left = waiting.filter(pc.invert(is_due))
    store_entries(batch, "waiting", left)
    set_earliest(batch, left["key"].to_numpy(), left["due_ms"].to_numpy())

    totals = waiting.group_by("key", use_threads=False).aggregate([("cents", "sum")])
    has_rows = pc.greater(batch.groups.count(), 0).take(totals["key"])
    too_much = totals.filter(pc.and_(pc.greater(totals["cents_sum"], LIMIT_CENTS), has_rows))
    expired = waiting.filter(pc.and_(is_due, pc.is_valid(waiting["cents"])))
    return pa.concat_tables(
        [
            _alerts(batch, "too much", too_much["key"], pa.nulls(len(too_much), pa.string()), too_much["cents_sum"]),
            _alerts(batch, "not confirmed", expired["key"], expired["payment"], expired["cents"]),
        ]
    )


def _alerts(batch: holdfast.ShardBatch, alert: str, key: Any, payment: Any, cents: Any) -> pa.Table:
    alerts = pa.array([alert] * len(key), pa.string())
    return pa.table({"card": batch.keys["card"].take(key), "alert": alerts, "payment": payment, "cents": cents})


def vectorised_alerts(events: DataFrame) -> DataFrame:
    """Return the same, for all cards of a shard at once."""
    cards = holdfast.stream(_timed(events)).groupBy("card")
    return cards.applyInArrowWithState(alerts_of_shard, ALERTS, STATE, "append", name="alerts", timeMode="EventTime")


def _timed(events: DataFrame) -> DataFrame:
    return events.withWatermark("at", "1 minute").withColumn("at_ms", F.unix_millis("at"))


BATCHES: list[MicroBatch] = [
    [("c1", "p1", 40_000, at(12, 0)), ("c1", "p2", 30_000, at(12, 1)), ("c2", "p3", None, at(12, 1, 30))],
    [("c1", "p2", None, at(12, 2)), ("c2", "p3", 90_000, at(12, 1)), ("c2", "p4", 95_000, at(12, 3))],
    [("c2", "p5", 15_000, at(12, 4)), ("c1", "p6", 500, at(12, 6, 30))],
    [("c1", "p6", None, at(12, 7)), ("c2", "p5", None, at(12, 7)), ("c3", "p7", 100, at(12, 20))],
]


def main() -> None:
    """Run both forms."""
    run_both(alerts, vectorised_alerts, EVENTS, BATCHES)


if __name__ == "__main__":
    main()
