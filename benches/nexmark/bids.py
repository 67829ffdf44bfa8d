"""Queries 18 and 19: the last bid of each bidder for each auction, and the ten highest bids of each auction.

Both keep whole bids, for ever. Every event has a time of its own, so that there is one last bid; of equal bids the
earlier one is the higher one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.benches.nexmark.events import BID, of_kind
from holdfast.benches.nexmark.query import Query
from holdfast.examples.stateful.entries import store_entries, stored_entries

_LAST = "at_us long, price long, channel string, url string"
_TOP = "place long, price long, at_us long, bidder long, channel string, url string"
_BID = "price: long, at_us: long, bidder: long, channel: string, url: string"
PLACES = 10


def _bids(events: DataFrame) -> DataFrame:
    at_us = F.unix_micros("at").alias("at_us")
    return of_kind(events, BID).select("bidder", "auction", at_us, "price", "channel", "url")


class Last(StatefulProcessor):
    """Keeps the last bid."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.last = handle.getValueState("last", _LAST)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        row, before = max(rows, key=lambda row: row.at_us), self.last.get()
        if before is None or row.at_us > before[0]:
            self.last.update((row.at_us, row.price, row.channel, row.url))
            yield Row(bidder=key[0], auction=key[1], at_us=row.at_us, price=row.price, channel=row.channel, url=row.url)


def last_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Do the same for all bidders and auctions of a shard."""
    old = batch.state.get()
    newest = batch.groups.last(pa.array(np.arange(batch.rows.num_rows)), order_by="at_us")
    last = batch.rows.select(old.column_names).take(newest)
    is_later = pc.fill_null(pc.greater(last["at_us"], old["at_us"]), True)
    batch.state.put(last, where=is_later)
    return pa.table([*batch.keys.columns, *last.columns], [*batch.keys.column_names, *last.column_names]).filter(
        is_later
    )


def _last_on_spark(events: DataFrame) -> DataFrame:
    last = F.max(F.struct("at_us", "price", "channel", "url")).alias("last")
    return _bids(events).groupBy("bidder", "auction").agg(last).select("bidder", "auction", "last.*")


LAST_BID = Query(
    number="18",
    title="last bid by bidder and auction",
    keys=("bidder", "auction"),
    rows=_bids,
    output=f"bidder long, auction long, {_LAST}",
    state=_LAST,
    vectorised=last_of_shard,
    processor=Last,
    on_spark=_last_on_spark,
    spark_mode="update",
    mode="update",
    time_mode="None",
    result_of=("bidder", "auction"),
    at_once=True,
    sql="""
        SELECT bidder, auction, unix_micros(at) AS at_us, price, channel, url
        FROM (SELECT *, row_number() OVER (PARTITION BY bidder, auction ORDER BY at DESC) AS place FROM bid)
        WHERE place = 1
    """,
)


class Top(StatefulProcessor):
    """Keeps the highest bids of an auction in a list, highest first; gives them out when they change."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.top = handle.getListState("top", "price long, at_us long, bidder long, channel string, url string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = [tuple(bid) for bid in self.top.get()]
        bids = [*before, *((row.price, row.at_us, row.bidder, row.channel, row.url) for row in rows)]
        top = sorted(bids, key=lambda bid: (-bid[0], bid[1]))[:PLACES]
        if top != before:
            self.top.put(top)
            for place, (price, at_us, bidder, channel, url) in enumerate(top, 1):
                yield Row(
                    auction=key[0], place=place, price=price, at_us=at_us, bidder=bidder, channel=channel, url=url
                )


def top_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Rank stored and new bids of all auctions together; where a new one is in the top, the top has changed."""
    old = stored_entries(batch, "top")
    new = batch.rows.select(["price", "at_us", "bidder", "channel", "url"])
    bids = pa.concat_tables([old, pa.table(new).append_column("key", pa.array(batch.groups.index))])
    key = bids["key"].to_numpy()
    order = np.lexsort((bids["at_us"].to_numpy(), -bids["price"].to_numpy(), key))
    key = key[order]
    place = np.arange(len(key)) - np.searchsorted(key, key) + 1
    is_top = place <= PLACES
    order, key, place = order[is_top], key[is_top], place[is_top]
    top = bids.take(order)
    store_entries(batch, "top", top)
    has_changed = np.zeros(batch.keys.num_rows, np.bool_)
    has_changed[key[order >= len(old)]] = True
    found = top.drop_columns(["key"]).append_column("place", pa.array(place))
    return found.append_column("auction", batch.keys["auction"].take(top["key"])).filter(has_changed[key])


TOP_BIDS = Query(
    number="19",
    title="ten highest bids by auction",
    keys=("auction",),
    rows=_bids,
    output=f"auction long, {_TOP}",
    state=f"top array<struct<{_BID}>>",
    vectorised=top_of_shard,
    processor=Top,
    mode="update",
    time_mode="None",
    result_of=("auction", "place"),
    at_once=True,
    sql="""
        SELECT auction, place, price, unix_micros(at) AS at_us, bidder, channel, url
        FROM (
            SELECT *, cast(row_number() OVER (PARTITION BY auction ORDER BY price DESC, at) AS long) AS place FROM bid
        )
        WHERE place <= 10
    """,
)
