"""Queries 4, 18 and 19: the average price by category; each bidder's last bid for an auction; an auction's ten highest.

The price of an auction is its highest bid between opening and expiry; it counts once the watermark has passed the
expiry. A bid may come before its auction, and waits for it until the watermark says that no such auction comes any
more. The operator gives out each closed auction; the average over five categories is an aggregation of Spark's, in all
ways to write the query.

Queries 18 and 19 keep whole bids, for ever. Every event has a time of its own, so that there is one last bid; of equal
bids the earlier one is the higher one.
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
from holdfast.benches.nexmark.events import BID, PERSON, of_kind, timed
from holdfast.benches.nexmark.query import Query
from holdfast.examples.stateful.entries import store_entries, stored_entries

_OPENED = "category long, opens_us long, expires_us long"
_NEVER = np.iinfo(np.int64).max


def _auctions_and_bids(events: DataFrame) -> DataFrame:
    wanted = timed(events.where(F.col("kind") != PERSON))
    return wanted.select(
        "auction",
        "category",
        "price",
        "at",
        F.unix_micros("at").alias("at_us"),
        F.unix_micros("expires").alias("expires_us"),
    )


class Closing(StatefulProcessor):
    """Keeps an auction, its highest bid, and bids that came before it; a timer closes it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.opened = handle.getValueState("opened", _OPENED)
        self.highest = handle.getValueState("highest", "price long")
        self.early = handle.getListState("early", "at_us long, price long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        opened, bids = self.opened.get(), []
        was_open = opened is not None
        for row in rows:
            if row.category is None:
                bids.append((row.at_us, row.price))
            else:
                opened = (row.category, row.at_us, row.expires_us)
        if opened is None:
            self.early.appendList(bids)
            self.handle.registerTimer(_after_ms(max(at_us for at_us, _ in bids)))
            return iter(())
        if not was_open:
            self.opened.update(tuple(opened))
            self.handle.registerTimer(_after_ms(opened[2]))
            bids += list(self.early.get())
            self.early.clear()
        prices = [price for at_us, price in bids if opened[1] <= at_us <= opened[2]]
        if prices:
            before = self.highest.get()
            self.highest.update((max(prices) if before is None else max(before[0], *prices),))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        opened, due_ms = self.opened.get(), expiredTimerInfo.getExpiryTimeInMs()
        if opened is None:
            # Those whose auction could still come have a later timer.
            waiting = [bid for bid in self.early.get() if _after_ms(bid[0]) > due_ms]
            self.early.clear()
            if waiting:
                self.early.put(waiting)
        elif _after_ms(opened[2]) == due_ms:
            highest = self.highest.get()
            self.opened.clear()
            self.highest.clear()
            if highest is not None:
                yield Row(category=opened[0], price=highest[0])


def _after_ms(at_us: int) -> int:
    """Return the first watermark that has passed a time."""
    return at_us // 1000 + 1


def closing(batch: holdfast.ShardBatch) -> pa.Table:
    """Do the same for all auctions of a shard."""
    watermark_us, state, rows, groups = (batch.watermark_ms or 0) * 1000, batch.state.get(), batch.rows, batch.groups
    opens_us = pc.if_else(pc.is_valid(rows["category"]), rows["at_us"], pa.scalar(None, pa.int64()))
    new = {"category": groups.max("category"), "opens_us": groups.max(opens_us), "expires_us": groups.max("expires_us")}
    opened = {name: pc.coalesce(state[name], value) for name, value in new.items()}
    is_open = opened["category"].is_valid().to_numpy()
    opens, expires = (opened[name].fill_null(_NEVER).to_numpy() for name in ("opens_us", "expires_us"))

    bids = pa.table({"at_us": rows["at_us"], "price": rows["price"], "key": groups.index})
    bids = pa.concat_tables([stored_entries(batch, "early"), bids.filter(pc.is_valid(bids["price"]))])
    key, at_us, price = (bids[name].to_numpy() for name in ("key", "at_us", "price"))
    counts = (opens[key] <= at_us) & (at_us <= expires[key])
    highest = np.array(state["price"].fill_null(0))
    np.maximum.at(highest, key[counts], price[counts])

    waits = np.flatnonzero(~is_open[key] & (at_us > watermark_us))
    waits = waits[np.argsort(key[waits], kind="stable")]
    bounds = np.searchsorted(key[waits], np.arange(len(is_open) + 1))
    early = bids.select(["at_us", "price"]).take(waits).to_struct_array().combine_chunks()
    is_over = is_open & (expires < watermark_us)
    stays = (is_open & ~is_over) | (bounds[1:] > bounds[:-1])
    columns = {**opened, "price": pa.array(highest, mask=highest == 0)}
    lists = pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), early)
    batch.state.put(pa.table({**columns, "early": lists}), where=stays)
    batch.state.delete(where=~stays)

    due_us = np.where(is_open, expires, 0)
    np.maximum.at(due_us, key[waits], at_us[waits])
    batch.timers.set(pa.array(due_us // 1000, mask=~stays))
    return pa.table(columns).select(["category", "price"]).filter(is_over & (highest > 0))


def _averages(closed: DataFrame) -> DataFrame:
    return closed.groupBy("category").agg(F.avg("price").alias("average"))


AVERAGE_PRICE = Query(
    number="4",
    title="average price by category",
    keys=("auction",),
    rows=_auctions_and_bids,
    output="category long, price long",
    state=f"{_OPENED}, price long, early array<struct<at_us: long, price: long>>",
    vectorised=closing,
    processor=Closing,
    then=_averages,
    mode="update",
    result_of=("category",),
    sql="""
        SELECT category, avg(price) AS average
        FROM (
            SELECT a.auction, a.category, max(b.price) AS price
            FROM auction a JOIN bid b ON a.auction = b.auction AND b.at BETWEEN a.at AND a.expires
            GROUP BY a.auction, a.category
        )
        GROUP BY category
    """,
)


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
