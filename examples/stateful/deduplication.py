"""Deduplication: an order that is delivered more than once counts once.

::

    python -m holdfast.examples.stateful.deduplication

prints each order at its first delivery, by a `StatefulProcessor` and vectorised; as an operator it is
``dropDuplicates(["id"], ttl="1 day")``::

    micro-batch 0: {'id': 17, 'item': 'tea', 'delivery': 1}

Orders expire after a day, so that the state does not grow forever. That is processing time, the clock of Spark's
micro-batches, not event time.
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
    """Keeps the first delivery of an order for a day."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.seen = handle.getValueState("seen", "delivery long", ttlDurationMs=DAY_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        if not self.seen.exists():
            first = min(rows, key=lambda row: row.delivery)
            self.seen.update((first.delivery,))
            yield first


def first_deliveries(orders: DataFrame) -> DataFrame:
    ids = holdfast.stream(orders).groupBy("id")
    return ids.transformWithState(FirstDeliveries(), ORDERS, "append", "ProcessingTime", name="orders")


def first_deliveries_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Return the first deliveries of orders without state."""
    is_new = pc.invert(batch.state.exists())
    first = {name: batch.groups.first(name, order_by="delivery") for name in ("item", "delivery")}
    batch.state.put(delivery=first["delivery"], where=is_new)
    return pa.table({"id": batch.keys["id"], **first}).filter(is_new)


def vectorised_first_deliveries(orders: DataFrame) -> DataFrame:
    """Vectorised; expired state is removed at the shard's next call."""
    seen = holdfast.StateTable("delivery long", ttl="1 day")
    ids = holdfast.stream(orders).groupBy("id")
    return ids.applyInArrowWithState(first_deliveries_of_shard, ORDERS, seen, "append", name="orders")


BATCHES: list[MicroBatch] = [
    [(17, "tea", 1), (18, "rice", 1), (18, "rice", 2)],
    [(17, "tea", 2), (19, "salt", 1)],
    [(19, "salt", 2), (17, "tea", 3), (20, "oil", 1)],
]


def main() -> None:
    run_both(first_deliveries, vectorised_first_deliveries, ORDERS, BATCHES, ends=False)


if __name__ == "__main__":
    main()
