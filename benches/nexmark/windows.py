"""Queries 5, 7, 8, 11 and 12: windows and sessions.

Query 5 counts bids by auction in windows of 10 s that start every 2 s, and finds the auction with the most bids in each
window: in a tie the oldest, where the published query finds all. Query 7 finds the highest bid of each window. Query 8
finds new people who sell in the same window; it needs no join, since a new person has a name and a seller an auction.

Query 11 counts the bids of a bidder in a session, which a bid joins up to 10 s after the session's last bid, as in
Spark and Flink. Query 12 counts by bidder in windows of processing time, which differs between runs; so this one uses
the time at which events would arrive evenly.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

import holdfast
from holdfast.benches.nexmark.events import AUCTION, BID, PERSON, House
from holdfast.benches.nexmark.query import Query

_SIZE, _SLIDE, _SIZE_US = "10 seconds", "2 seconds", 10_000_000


def _begins() -> Column:
    return F.unix_millis("window.start").alias("window_ms")


def _hottest_in_one_line(house: House) -> DataFrame:
    by_auction = holdfast.stream(house.of(BID)).groupBy("auction")
    counts = by_auction.window("at", _SIZE, _SLIDE).agg(n=holdfast.count(), name="counts")
    # Windows of 10 s with the same end fall into the same window of two seconds.
    return _of_hottest(holdfast.stream(counts).window("window", _SLIDE).agg(best=holdfast.max(_hotness())))


def _hottest_on_spark(house: House) -> DataFrame:
    counts = house.of(BID).groupBy(F.window("at", _SIZE, _SLIDE), "auction").agg(F.count("*").alias("n"))
    return _of_hottest(counts.groupBy(F.window("window", _SLIDE)).agg(F.max(_hotness()).alias("best")))


def _hotness() -> Column:
    return F.struct("n", (-F.col("auction")).alias("older"))


def _of_hottest(best: DataFrame) -> DataFrame:
    begins = F.unix_millis("window.end") - _SIZE_US // 1000
    return best.select(begins.alias("window_ms"), (-F.col("best.older")).alias("auction"), "best.n")


HOT_ITEMS = Query(
    number="5",
    title="hot items",
    in_one_line=_hottest_in_one_line,
    on_spark=_hottest_on_spark,
    chains=True,
    result_of=("window_ms",),
    sql="""
        SELECT unix_millis(window.start) AS window_ms, -best.older AS auction, best.n
        FROM (
            SELECT window, max(struct(n, -auction AS older)) AS best
            FROM (
                SELECT window, auction, count(*) AS n
                FROM bid
                GROUP BY window(at, '10 seconds', '2 seconds'), auction
            )
            GROUP BY window
        )
    """,
)


def _highest_in_one_line(house: House) -> DataFrame:
    return _of_highest(holdfast.stream(house.of(BID)).window("at", _SIZE).agg(best=holdfast.max(_height())))


def _highest_on_spark(house: House) -> DataFrame:
    return _of_highest(house.of(BID).groupBy(F.window("at", _SIZE)).agg(F.max(_height()).alias("best")))


def _height() -> Column:
    return F.struct("price", (-F.unix_micros("at")).alias("earlier"), "auction", "bidder")


def _of_highest(best: DataFrame) -> DataFrame:
    at_us = (-F.col("best.earlier")).alias("at_us")
    return best.select(_begins(), "best.price", at_us, "best.auction", "best.bidder")


HIGHEST_BID = Query(
    number="7",
    title="highest bid",
    in_one_line=_highest_in_one_line,
    on_spark=_highest_on_spark,
    result_of=("window_ms",),
    sql="""
        SELECT unix_millis(begins) AS window_ms, price, unix_micros(at) AS at_us, auction, bidder
        FROM (
            SELECT *, row_number() OVER (PARTITION BY begins ORDER BY price DESC, at) AS place
            FROM (SELECT *, window(at, '10 seconds').start AS begins FROM bid)
        )
        WHERE place = 1
    """,
)


def _new_sellers_in_one_line(house: House) -> DataFrame:
    by_person = holdfast.stream(house.of(PERSON, AUCTION)).groupBy(_person())
    windows = by_person.window("at", _SIZE).agg(holdfast.max("name").alias("name"), sold=holdfast.count("seller"))
    return _of_new_sellers(windows)


def _new_sellers_on_spark(house: House) -> DataFrame:
    by_person = house.of(PERSON, AUCTION).groupBy(_person(), F.window("at", _SIZE))
    return _of_new_sellers(by_person.agg(F.max("name").alias("name"), F.count("seller").alias("sold")))


def _person() -> Column:
    return F.coalesce("person", "seller").alias("person")


def _of_new_sellers(windows: DataFrame) -> DataFrame:
    return windows.where("name IS NOT NULL AND sold > 0").select("person", _begins(), "name")


NEW_USERS = Query(
    number="8",
    title="new users who sell",
    in_one_line=_new_sellers_in_one_line,
    on_spark=_new_sellers_on_spark,
    result_of=("person", "window_ms"),
    sql="""
        SELECT DISTINCT p.person, unix_millis(p.begins) AS window_ms, p.name
        FROM (SELECT *, window(at, '10 seconds').start AS begins FROM person) p
        JOIN (SELECT *, window(at, '10 seconds').start AS begins FROM auction) a
        ON p.person = a.seller AND p.begins = a.begins
    """,
)


def _sessions_in_one_line(house: House) -> DataFrame:
    by_bidder = holdfast.stream(house.of(BID)).groupBy("bidder")
    return _of_session(by_bidder.session("at", _SIZE).agg(n=holdfast.count()))


def _sessions_on_spark(house: House) -> DataFrame:
    sessions = house.of(BID).groupBy(F.session_window("at", _SIZE), "bidder").agg(F.count("*").alias("n"))
    return _of_session(sessions)


def _of_session(sessions: DataFrame) -> DataFrame:
    first_us, end_us = F.unix_micros("session_window.start"), F.unix_micros("session_window.end")
    return sessions.select("bidder", first_us.alias("first_us"), (end_us - _SIZE_US).alias("last_us"), "n")


USER_SESSIONS = Query(
    number="11",
    title="bids of a bidder in a session",
    in_one_line=_sessions_in_one_line,
    on_spark=_sessions_on_spark,
    result_of=("bidder", "first_us"),
    sql="""
        SELECT bidder, min(at_us) AS first_us, max(at_us) AS last_us, count(*) AS n
        FROM (
            SELECT *, sum(is_first) OVER (PARTITION BY bidder ORDER BY at_us) AS session
            FROM (
                SELECT bidder, unix_micros(at) AS at_us,
                    if(unix_micros(at) - lag(unix_micros(at)) OVER (PARTITION BY bidder ORDER BY at) <= 10000000, 0, 1)
                    AS is_first
                FROM bid
            )
        )
        GROUP BY bidder, session
    """,
)


def _counts_in_one_line(house: House) -> DataFrame:
    by_bidder = holdfast.stream(house.of(BID, time="arrived")).groupBy("bidder")
    return by_bidder.window("arrived", _SIZE).agg(n=holdfast.count()).select("bidder", _begins(), "n")


def _counts_on_spark(house: House) -> DataFrame:
    bids = house.of(BID, time="arrived")
    counts = bids.groupBy(F.window("arrived", _SIZE), "bidder").agg(F.count("*").alias("n"))
    return counts.select("bidder", _begins(), "n")


COUNT_BY_BIDDER = Query(
    number="12",
    title="bids of a bidder in a window of (simulated) processing time",
    in_one_line=_counts_in_one_line,
    on_spark=_counts_on_spark,
    result_of=("bidder", "window_ms"),
    sql="""
        SELECT bidder, unix_millis(window.start) AS window_ms, count(*) AS n
        FROM bid
        GROUP BY bidder, window(arrived, '10 seconds')
    """,
)
