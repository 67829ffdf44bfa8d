"""Queries 4, 9, 18, 19 and 20: auctions with their bids, and bids that are kept forever.

Query 9 finds an auction's highest bid between opening and expiry, the earliest of equal bids; query 4 averages these by
category. An auction counts once the watermark has passed the second of its expiry. A bid that arrives before its
auction waits until the watermark rules that auction out. Query 20 joins bids with their auctions; since a bid happens
near the opening, its state is bounded, whereas that of the published query keeps growing.

Queries 18 and 19 keep whole bids forever. Event times are unique, so that there is one last bid; of equal bids the
earlier one ranks higher.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.benches.nexmark.events import AUCTION, BID, House, of_kind
from holdfast.benches.nexmark.query import ByKey, Query

_BID = ("auction", "bidder", "price", "channel", "url")
_OPENED = "category long, opens_us long, expires_us long"


def _winning_in_one_line(house: House) -> DataFrame:
    auctions, bids = holdfast.stream(_auctions(house, time="expires")), holdfast.stream(_timed_bids(house))
    pairs = auctions.join(bids, on="auction", within=f"{house.mix.longest_ms} milliseconds")
    by_auction = holdfast.stream(_in_time(pairs)).groupBy("auction", "category")
    return _of_winning(by_auction.window("expires", "1 second").agg(best=holdfast.max(_height())))


def _winning_on_spark(house: House) -> DataFrame:
    auctions = _auctions(house, time="expires").withColumnRenamed("auction", "id")
    longest = f"INTERVAL {house.mix.longest_ms} MILLISECONDS"
    near = F.expr(f"auction = id AND expires >= at AND expires <= at + {longest}")
    pairs = _in_time(auctions.join(_timed_bids(house), near))
    by_auction = pairs.groupBy("auction", "category", F.window("expires", "1 second"))
    return _of_winning(by_auction.agg(F.max(_height()).alias("best")))


def _auctions(house: House, time: str = "at") -> DataFrame:
    opens = F.col("at").alias("opens")
    return house.of(AUCTION, time=time).select("auction", "seller", "category", opens, "expires")


def _timed_bids(house: House) -> DataFrame:
    return house.of(BID).select("auction", "bidder", "price", "at", F.unix_micros("at").alias("at_us"))


def _in_time(pairs: DataFrame) -> DataFrame:
    return pairs.where("at BETWEEN opens AND expires").drop("at")


def _height() -> Column:
    return F.struct("price", (-F.col("at_us")).alias("earlier"), "bidder")


def _of_winning(best: DataFrame) -> DataFrame:
    at_us = (-F.col("best.earlier")).alias("at_us")
    return best.select("auction", "category", "best.price", at_us, "best.bidder")


WINNING_BIDS = Query(
    number="9",
    title="winning bid of an auction",
    in_one_line=_winning_in_one_line,
    on_spark=_winning_on_spark,
    chains=True,
    result_of=("auction",),
    sql="""
        SELECT auction, category, price, at_us, bidder
        FROM (
            SELECT a.auction, a.category, b.price, unix_micros(b.at) AS at_us, b.bidder,
                row_number() OVER (PARTITION BY a.auction ORDER BY b.price DESC, b.at) AS place
            FROM auction a JOIN bid b ON a.auction = b.auction AND b.at BETWEEN a.at AND a.expires
        )
        WHERE place = 1
    """,
)


def _average_in_one_line(house: House) -> DataFrame:
    by_category = holdfast.stream(_winning_in_one_line(house)).groupBy("category")
    return by_category.agg(average=holdfast.mean("price"))


def _auctions_and_bids(house: House) -> DataFrame:
    at_us, expires_us = F.unix_micros("at").alias("at_us"), F.unix_micros("expires").alias("expires_us")
    return house.of(AUCTION, BID).select("auction", "category", "price", "at", at_us, expires_us)


class Closing(StatefulProcessor):
    """Keeps an auction, its highest bid, and bids that arrived before it; a timer closes it."""

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
            # Bids whose auction may still arrive have a later timer.
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
    """Return the first watermark after a time."""
    return at_us // 1000 + 1


def _averages(closed: DataFrame) -> DataFrame:
    return closed.groupBy("category").agg(F.avg("price").alias("average"))


_CLOSING = ByKey(_auctions_and_bids, ("auction",), Closing, "category long, price long", "EventTime", _averages)
AVERAGE_PRICE = Query(
    number="4",
    title="average price by category",
    in_one_line=_average_in_one_line,
    on_spark=_CLOSING.on_spark,
    by_key=_CLOSING.on_holdfast,
    chains=True,
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


def _of_category_in_one_line(house: House) -> DataFrame:
    auctions = holdfast.stream(_auctions(house).where("category = 10"))
    bids, within = holdfast.stream(house.of(BID).select(*_BID, "at")), f"{house.mix.reach_ms} milliseconds"
    return _of_pairs(bids.join(auctions, on="auction", within=within))


def _of_category_on_spark(house: House) -> DataFrame:
    auctions = _auctions(house).where("category = 10").withColumnRenamed("auction", "id")
    reach = f"INTERVAL {house.mix.reach_ms} MILLISECONDS"
    near = F.expr(f"auction = id AND at >= opens - {reach} AND at <= opens + {reach}")
    return _of_pairs(house.of(BID).select(*_BID, "at").join(auctions, near))


def _of_pairs(pairs: DataFrame) -> DataFrame:
    return pairs.select(*_BID, F.unix_micros("at").alias("at_us"), "seller", "category")


BIDS_OF_CATEGORY = Query(
    number="20",
    title="bids beside their auctions, of one category",
    in_one_line=_of_category_in_one_line,
    on_spark=_of_category_on_spark,
    result_of=("at_us",),
    at_once=True,
    sql="""
        SELECT b.auction, b.bidder, b.price, b.channel, b.url, unix_micros(b.at) AS at_us, a.seller, a.category
        FROM bid b JOIN auction a ON b.auction = a.auction
        WHERE a.category = 10
    """,
)


def _bids(house: House) -> DataFrame:
    return of_kind(house.events, BID).select(*_BID, F.unix_micros("at").alias("at_us"))


def _last_in_one_line(house: House) -> DataFrame:
    return holdfast.stream(_bids(house)).groupBy("bidder", "auction").latest(by="at_us")


def _last_on_spark(house: House) -> DataFrame:
    last = F.max(F.struct("at_us", "price", "channel", "url")).alias("last")
    return _bids(house).groupBy("bidder", "auction").agg(last).select("bidder", "auction", "last.*")


LAST_BID = Query(
    number="18",
    title="last bid by bidder and auction",
    in_one_line=_last_in_one_line,
    on_spark=_last_on_spark,
    mode="update",
    result_of=("bidder", "auction"),
    at_once=True,
    sql="""
        SELECT bidder, auction, unix_micros(at) AS at_us, price, channel, url
        FROM (SELECT *, row_number() OVER (PARTITION BY bidder, auction ORDER BY at DESC) AS place FROM bid)
        WHERE place = 1
    """,
)


_TOP = "price long, at_us long, bidder long, channel string, url string"
_PLACES = 10


def _top_in_one_line(house: House) -> DataFrame:
    by_auction = holdfast.stream(_bids(house)).groupBy("auction")
    return by_auction.top(_PLACES, by=["price", "at_us"], ascending=[False, True])


class Top(StatefulProcessor):
    """Keeps the highest bids of an auction in a list, in descending order; emits them when they change."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.top = handle.getListState("top", _TOP)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = [tuple(bid) for bid in self.top.get()]
        bids = [*before, *((row.price, row.at_us, row.bidder, row.channel, row.url) for row in rows)]
        top = sorted(bids, key=lambda bid: (-bid[0], bid[1]))[:_PLACES]
        if top != before:
            self.top.put(top)
            for place, (price, at_us, bidder, channel, url) in enumerate(top, 1):
                yield Row(
                    auction=key[0], place=place, price=price, at_us=at_us, bidder=bidder, channel=channel, url=url
                )


_BY_PLACE = ByKey(_bids, ("auction",), Top, f"auction long, place long, {_TOP}", "None")
TOP_BIDS = Query(
    number="19",
    title="ten highest bids by auction",
    in_one_line=_top_in_one_line,
    on_spark=_BY_PLACE.on_spark,
    by_key=_BY_PLACE.on_holdfast,
    mode="update",
    result_of=("auction", "place"),
    at_once=True,
    sql="""
        SELECT auction, place, price, unix_micros(at) AS at_us, bidder, channel, url
        FROM (SELECT *, row_number() OVER (PARTITION BY auction ORDER BY price DESC, at) AS place FROM bid)
        WHERE place <= 10
    """,
)
