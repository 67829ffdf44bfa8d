"""Top bids: the three highest bids of each auction, whenever they change.

::

    python -m holdfast.examples.stateful.top_bids

prints them by a `StatefulProcessor` and vectorised; as an operator it is
``groupBy("auction").top(3, by=["price", "bidder"], ascending=[False, True])``::

    micro-batch 0: {'auction': 1, 'place': 1, 'bidder': 'bob', 'price': 30}

Equal bids are ranked by bidder, so that the result does not depend on the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.examples.stateful.entries import store_entries, with_keys, with_stored
from holdfast.examples.stateful.local import MicroBatch, run_both

BIDS = "auction long, bidder string, price long"
TOP = "auction long, place int, bidder string, price long"
STATE = "top array<struct<price: long, bidder: string>>"
PLACES = 3


class TopBids(StatefulProcessor):
    """Keeps the highest bids of an auction in a list, in descending order."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.top = handle.getListState("top", "price long, bidder string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = list(self.top.get())
        bids = [*before, *((row.price, row.bidder) for row in rows)]
        top = sorted(bids, key=lambda bid: (-bid[0], bid[1]))[:PLACES]
        if top != before:
            self.top.put(top)
            for place, (price, bidder) in enumerate(top, 1):
                yield Row(auction=key[0], place=place, bidder=bidder, price=price)


def top_bids(bids: DataFrame) -> DataFrame:
    """Return the highest bids of each auction when a micro-batch changes them."""
    auctions = holdfast.stream(bids).groupBy("auction")
    return auctions.transformWithState(TopBids(), TOP, "append", "None", name="top")


def top_bids_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Rank stored and new bids of all auctions together; the top changes if it contains a new bid."""
    new = batch.rows.select(["price", "bidder"]).to_pandas().assign(is_new=1)
    bids = with_stored(batch, "top", new)  # equal bids keep this order: stored ones first
    bids = bids.sort_values(["key", "price", "bidder"], ascending=[True, False, True])
    bids["place"] = bids.groupby("key").cumcount().astype("int32") + 1
    top = bids[bids["place"] <= PLACES]
    store_entries(batch, "top", top[["price", "bidder", "key"]])
    has_changed = top.groupby("key")["is_new"].transform("any")
    return with_keys(batch, top.loc[has_changed, ["place", "bidder", "price", "key"]])


def vectorised_top_bids(bids: DataFrame) -> DataFrame:
    auctions = holdfast.stream(bids).groupBy("auction")
    return auctions.applyInArrowWithState(top_bids_of_shard, TOP, STATE, "append", name="top")


BATCHES: list[MicroBatch] = [
    [(1, "ann", 10), (1, "bob", 30), (2, "ann", 5)],
    [(1, "cem", 20), (1, "dan", 25), (1, "eve", 1)],
    [(1, "eve", 2), (2, "bob", 5), (2, "ann", 6)],
]


def main() -> None:
    run_both(top_bids, vectorised_top_bids, BIDS, BATCHES)


if __name__ == "__main__":
    main()
