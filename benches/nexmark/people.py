"""Query 8: who is new and sells at once; and query 11: how many bids a bidder makes in a session.

Query 8 finds people who entered and opened an auction in the same window of 10 s, as soon as both are known: the key is
person and window, so that state lives as long as the window. In query 11 a bid joins a session up to 10 s after its
last bid, as in Spark's ``session_window`` and Flink's session windows, which merge windows that touch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.benches.nexmark.events import AUCTION, BID, PERSON, of_kind, timed, window_ms
from holdfast.benches.nexmark.query import Query
from holdfast.examples.stateful.entries import set_earliest, store_entries, stored_entries

SIZE_MS, GAP_US = 10_000, 10_000_000


def _people_and_sellers(events: DataFrame) -> DataFrame:
    wanted = timed(events.where(F.col("kind") != BID))
    person = F.coalesce("person", "seller").alias("person")
    return wanted.select(person, window_ms("at", SIZE_MS).alias("window_ms"), "at", "name")


class NewSeller(StatefulProcessor):
    """Keeps which half of the join has come; a timer ends the window."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.seen = handle.getValueState("seen", "name string, sells boolean")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = self.seen.get()
        name, sells = (None, False) if before is None else (before[0], before[1])
        was_found = name is not None and sells
        for row in rows:
            if row.name is None:
                sells = True
            else:
                name = row.name
        if before is None or (name, sells) != (before[0], before[1]):
            self.seen.update((name, sells))
        if before is None:
            self.handle.registerTimer(key[1] + SIZE_MS)
        if name is not None and sells and not was_found:
            yield Row(person=key[0], window_ms=key[1], name=name)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.seen.clear()
        return iter(())


def new_sellers(batch: holdfast.ShardBatch) -> pa.Table:
    """Do the same for all people of a shard."""
    old, groups = batch.state.get(), batch.groups
    has_name = pc.is_valid(batch.rows["name"])
    of_person = pc.if_else(has_name, pa.array(np.arange(batch.rows.num_rows)), pa.scalar(None, pa.int64()))
    name = pc.coalesce(old["name"], batch.rows["name"].take(groups.max(of_person)))
    sold, sells_now = old["sells"].fill_null(False), pc.greater(groups.count(), groups.count("name"))
    sells = pc.or_(sold, sells_now)
    was_found, is_found = pc.and_(pc.is_valid(old["name"]), sold), pc.and_(pc.is_valid(name), sells)
    ends_ms = pc.add(batch.keys["window_ms"], SIZE_MS)
    is_over = pc.less_equal(ends_ms, batch.watermark_ms or 0)
    stays = pc.invert(is_over)
    batch.state.put(name=name, sells=sells, where=stays)
    batch.state.delete(where=is_over)
    batch.timers.set(pc.subtract(ends_ms, 1), where=stays)
    return batch.keys.append_column("name", name).filter(pc.and_not(is_found, was_found))


def _new_sellers_on_spark(events: DataFrame) -> DataFrame:
    window = F.window("at", f"{SIZE_MS} milliseconds").alias("window")
    people = timed(of_kind(events, PERSON)).select("person", "name", window)
    sellers = timed(of_kind(events, AUCTION)).select("seller", window).withColumnRenamed("window", "sold")
    sellers = sellers.dropDuplicates(["seller", "sold"])
    both = people.join(sellers, (F.col("person") == F.col("seller")) & (F.col("window") == F.col("sold")))
    return both.select("person", F.unix_millis("window.start").alias("window_ms"), "name")


NEW_USERS = Query(
    number="8",
    title="new users who sell",
    keys=("person", "window_ms"),
    rows=_people_and_sellers,
    output="person long, window_ms long, name string",
    state="name string, sells boolean",
    vectorised=new_sellers,
    processor=NewSeller,
    on_spark=_new_sellers_on_spark,
    result_of=("person", "window_ms"),
    at_once=True,
    sql="""
        SELECT DISTINCT p.person, unix_millis(p.begins) AS window_ms, p.name
        FROM (SELECT *, window(at, '10 seconds').start AS begins FROM person) p
        JOIN (SELECT *, window(at, '10 seconds').start AS begins FROM auction) a
        ON p.person = a.seller AND p.begins = a.begins
    """,
)


_SESSION = "first_us long, last_us long, n long"


def _bids(events: DataFrame) -> DataFrame:
    return timed(of_kind(events, BID)).select("bidder", "at", F.unix_micros("at").alias("at_us"))


class Sessions(StatefulProcessor):
    """Keeps a bidder's open sessions in a list; a timer ends each."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.open = handle.getListState("open", _SESSION)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = [tuple(session) for session in self.open.get()]
        parts = sorted([*before, *((row.at_us, row.at_us, 1) for row in rows)])
        merged = parts[:1]
        for first_us, last_us, n in parts[1:]:
            session = merged[-1]
            if first_us - session[1] <= GAP_US:
                merged[-1] = (session[0], max(session[1], last_us), session[2] + n)
            else:
                merged.append((first_us, last_us, n))
        self.open.put(merged)
        ends = {session[1] for session in before}
        for _, last_us, _ in merged:
            if last_us not in ends:
                self.handle.registerTimer(_over_ms(last_us))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        due_ms = expiredTimerInfo.getExpiryTimeInMs()
        sessions = [tuple(session) for session in self.open.get()]
        stays = [session for session in sessions if _over_ms(session[1]) > due_ms]
        if len(stays) == len(sessions):
            return  # a later bid has joined the session of this timer
        self.open.clear()
        if stays:
            self.open.put(stays)
        for first_us, last_us, n in sessions[: len(sessions) - len(stays)]:
            yield Row(bidder=key[0], first_us=first_us, last_us=last_us, n=n)


def _over_ms(last_us: Any) -> Any:
    """Return the first watermark behind which no bid can join a session."""
    return (last_us + GAP_US) // 1000 + 1


def sessions_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Sort the open sessions and the bids of all bidders together, and cut where the gap is too long."""
    at_us, ones = batch.rows["at_us"], np.ones(batch.rows.num_rows, np.int64)
    bids = pa.table([at_us, at_us, ones, batch.groups.index], names=["first_us", "last_us", "n", "key"])
    parts = pa.concat_tables([stored_entries(batch, "open"), bids])
    key, first_us, last_us, n = (parts[name].to_numpy() for name in ("key", "first_us", "last_us", "n"))
    order = np.lexsort((first_us, key))
    key, first_us, last_us, n = key[order], first_us[order], last_us[order], n[order]
    last_so_far_us = pd.Series(last_us).groupby(key).cummax().to_numpy()
    is_first = np.ones(len(key), np.bool_)
    is_first[1:] = (key[1:] != key[:-1]) | (first_us[1:] - last_so_far_us[:-1] > GAP_US)
    begins = np.flatnonzero(is_first)
    last_us = np.maximum.reduceat(last_us, begins)
    sessions = pa.table(
        {"first_us": first_us[begins], "last_us": last_us, "n": np.add.reduceat(n, begins), "key": key[begins]}
    )
    over_ms = _over_ms(last_us)
    is_over = over_ms <= (batch.watermark_ms or 0)
    store_entries(batch, "open", sessions.filter(~is_over))
    set_earliest(batch, key[begins][~is_over], over_ms[~is_over])
    over = sessions.filter(is_over)
    return over.append_column("bidder", batch.keys["bidder"].take(over["key"])).drop_columns(["key"])


def _sessions_on_spark(events: DataFrame) -> DataFrame:
    bids = timed(of_kind(events, BID))
    sessions = bids.groupBy(F.session_window("at", f"{GAP_US} microseconds"), "bidder").agg(F.count("*").alias("n"))
    first_us, end_us = F.unix_micros("session_window.start"), F.unix_micros("session_window.end")
    return sessions.select("bidder", first_us.alias("first_us"), (end_us - GAP_US).alias("last_us"), "n")


USER_SESSIONS = Query(
    number="11",
    title="bids of a bidder in a session",
    keys=("bidder",),
    rows=_bids,
    output=f"bidder long, {_SESSION}",
    state=f"open array<struct<{_SESSION}>>",
    vectorised=sessions_of_shard,
    processor=Sessions,
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
