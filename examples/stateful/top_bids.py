"""Top bids: the three highest bids of each auction, whenever they change.

::

    python -m holdfast.examples.stateful.top_bids

prints them by a `StatefulProcessor` and for all auctions of a shard at once::

    micro-batch 0: {'auction': 1, 'place': 1, 'bidder': 'bob', 'price': 30}

Of equal bids that of the bidder who comes first in the alphabet is the higher one, so that the result does not depend
on the order in which bids come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.examples.stateful.entries import store_entries, stored_entries
from holdfast.examples.stateful.local import MicroBatch, run_both

BIDS = "auction long, bidder string, price long"
TOP = "auction long, place int, bidder string, price long"
STATE = "top array<struct<price: long, bidder: string>>"
PLACES = 3


class TopBids(StatefulProcessor):
    """Keeps the highest bids of an auction in a list, highest first."""

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
    """Return the highest bids of each auction that a micro-batch has changed, by key."""
    auctions = holdfast.stream(bids).groupBy("auction")
    return auctions.transformWithState(TopBids(), TOP, "append", "None", name="top")


def top_bids_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Rank stored and new bids of all auctions together; where a new one is in the top, the top has changed."""
    old = stored_entries(batch, "top")
    new = pa.table({"price": batch.rows["price"], "bidder": batch.rows["bidder"], "key": batch.groups.index})
    bids = pa.concat_tables([old, new])
    bids = bids.append_column("arrival", pa.array(np.arange(len(bids))))  # of equal bids, stored ones stand first
    order = ["ascending", "descending", "ascending", "ascending"]
    bids = bids.sort_by(list(zip(["key", "price", "bidder", "arrival"], order, strict=True)))
    key = bids["key"].to_numpy()
    place = np.arange(len(bids)) - np.searchsorted(key, key) + 1
    is_top = place <= PLACES
    top, key, place = bids.filter(is_top), key[is_top], place[is_top]
    store_entries(batch, "top", top.drop_columns(["arrival"]))
    has_changed = np.zeros(batch.keys.num_rows, np.bool_)
    has_changed[key[top["arrival"].to_numpy() >= len(old)]] = True
    found = pa.table(
        {
            "auction": batch.keys["auction"].take(top["key"]),
            "place": pa.array(place, pa.int32()),
            "bidder": top["bidder"],
            "price": top["price"],
        }
    )
    return found.filter(has_changed[key])


def vectorised_top_bids(bids: DataFrame) -> DataFrame:
    """Return the same, for all auctions of a shard at once."""
    auctions = holdfast.stream(bids).groupBy("auction")
    return auctions.applyInArrowWithState(top_bids_of_shard, TOP, STATE, "append", name="top")


BATCHES: list[MicroBatch] = [
    [(1, "ann", 10), (1, "bob", 30), (2, "ann", 5)],
    [(1, "cem", 20), (1, "dan", 25), (1, "eve", 1)],
    [(1, "eve", 2), (2, "bob", 5), (2, "ann", 6)],
]


def main() -> None:
    """Run both forms."""
    run_both(top_bids, vectorised_top_bids, BIDS, BATCHES)


if __name__ == "__main__":
    main()
