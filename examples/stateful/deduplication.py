"""Deduplication: an order that is delivered more than once counts once.

::

    python -m holdfast.examples.stateful.deduplication

prints each order when it is first delivered, by a `StatefulProcessor` and for all orders of a shard at once; in one
line it is ``dropDuplicates(["id"], ttl="1 day")``::

    micro-batch 0: {'id': 17, 'item': 'tea', 'delivery': 1}

An order that was seen is forgotten after a day, so that state does not grow for ever. That day is one of processing
time: of the clock by which Spark plans micro-batches, not of the orders' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.examples.stateful.local import MicroBatch, run_both

ORDERS = "id long, item string, delivery long"
DAY_MS = 24 * 3_600_000


class FirstDeliveries(StatefulProcessor):
    """Remembers for a day that an order was seen."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.seen = handle.getValueState("seen", "delivery long", ttlDurationMs=DAY_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        if not self.seen.exists():
            first = min(rows, key=lambda row: row.delivery)
            self.seen.update((first.delivery,))
            yield first


def first_deliveries(orders: DataFrame) -> DataFrame:
    """Return each order once, by key."""
    ids = holdfast.stream(orders).groupBy("id")
    return ids.transformWithState(FirstDeliveries(), ORDERS, "append", "ProcessingTime", name="orders")


def first_deliveries_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Keep what comes first of the orders that have no state."""
    is_new = pc.invert(batch.state.exists())
    first = {name: batch.groups.first(name, order_by="delivery") for name in ("item", "delivery")}
    batch.state.put(delivery=first["delivery"], where=is_new)
    return pa.table({"id": batch.keys["id"], **first}).filter(is_new)


def vectorised_first_deliveries(orders: DataFrame) -> DataFrame:
    """Return the same, for all orders of a shard at once; what has expired goes when the shard has rows again."""
    seen = holdfast.StateTable("delivery long", ttl="1 day")
    ids = holdfast.stream(orders).groupBy("id")
    return ids.applyInArrowWithState(first_deliveries_of_shard, ORDERS, seen, "append", name="orders")


BATCHES: list[MicroBatch] = [
    [(17, "tea", 1), (18, "rice", 1), (18, "rice", 2)],
    [(17, "tea", 2), (19, "salt", 1)],
    [(19, "salt", 2), (17, "tea", 3), (20, "oil", 1)],
]


def main() -> None:
    """Run both forms."""
    run_both(first_deliveries, vectorised_first_deliveries, ORDERS, BATCHES, ends=False)


if __name__ == "__main__":
    main()
