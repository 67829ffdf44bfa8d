"""Fraud: unconfirmed card payments.

::

    python -m holdfast.examples.stateful.fraud

prints an alert when the unconfirmed payments of a card exceed 1,000.00, and when a payment has been unconfirmed for
five minutes, by a `StatefulProcessor` and vectorised::

    micro-batch 3: {'card': 'c1', 'alert': 'not confirmed', 'payment': 'p1', 'cents': 40000}

A payment and its confirmation may arrive in any order: the first one is kept until the second one removes it. The five
minutes are event time: they end when the watermark, one minute behind the newest row, has passed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.examples.stateful.entries import store_entries, stored_entries, with_keys
from holdfast.examples.stateful.local import MicroBatch, at, run_both

# Payments have an amount, confirmations have none.
EVENTS = "card string, payment string, cents long, at timestamp"
ALERTS = "card string, alert string, payment string, cents long"
STATE = "waiting array<struct<payment: string, cents: long, due_ms: long>>"
WAIT_MS = 5 * 60_000
LIMIT_CENTS = 100_000


class Watch(StatefulProcessor):
    """Keeps payments and confirmations without their counterpart in a map, each with a timer."""

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
    cards = holdfast.stream(_timed(events)).groupBy("card")
    return cards.transformWithState(Watch(), ALERTS, "append", "EventTime", name="alerts")


def alerts_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Combine stored and new rows of all cards; rows without a counterpart keep waiting."""
    new = batch.rows.select(["payment", "cents"])
    new = new.append_column("due_ms", pc.add(batch.rows["at_ms"], WAIT_MS))
    new = new.append_column("key", pa.array(batch.groups.index))
    halves = pa.concat_tables([stored_entries(batch, "waiting"), new]).to_pandas(types_mapper=pd.ArrowDtype)
    waiting = halves[~halves.duplicated(["key", "payment"], keep=False)].sort_values(["key", "payment"])
    is_due = waiting["due_ms"] <= batch.watermark_ms
    left = waiting[~is_due]
    store_entries(batch, "waiting", left, due_ms=left["due_ms"])
    totals = waiting.groupby("key", as_index=False)["cents"].sum()
    has_rows = totals["key"].isin(batch.groups.index)
    too_much = totals[(totals["cents"] > LIMIT_CENTS) & has_rows].assign(alert="too much", payment=None)
    expired = waiting[is_due & waiting["cents"].notna()].assign(alert="not confirmed")
    return pa.concat_tables([_alerts(batch, too_much), _alerts(batch, expired)])


def _alerts(batch: holdfast.ShardBatch, found: pd.DataFrame) -> pa.Table:
    types = pa.schema({"alert": pa.string(), "payment": pa.string(), "cents": pa.int64(), "key": pa.int64()})
    return with_keys(batch, pa.Table.from_pandas(found, types, preserve_index=False))


def vectorised_alerts(events: DataFrame) -> DataFrame:
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
    run_both(alerts, vectorised_alerts, EVENTS, BATCHES)


if __name__ == "__main__":
    main()
