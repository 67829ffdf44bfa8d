"""Queries 5, 7, 8, 11 and 12, in windows and sessions.

Queries 5 and 12 ask how many bids a key has in each window, 7 for the highest bid of each, 8 who is new and sells in
the same one, and 11 how many bids a bidder makes in a session.

Counts are kept by the end of their window, and given out when the watermark has passed it. Query 5 counts by auction,
in windows of 10 s that begin every 2 s, and then takes the auction with the most bids of each window: the oldest of
several, where the published query gives out all of them. Query 12 counts by bidder in windows of processing time, which
no two runs share: here it is the time at which events come if they come evenly.

Query 8 gives out a person as soon as both are known: the key is person and window, so that state lives as long as the
window. In query 11 a bid joins a session up to 10 s after its last bid, as in Spark's ``session_window`` and Flink's
session windows, which merge windows that touch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.benches.nexmark.events import AUCTION, BID, PERSON, of_kind, timed
from holdfast.benches.nexmark.query import Query
from holdfast.examples.stateful.entries import set_earliest, store_entries, stored_entries

_Ints = npt.NDArray[np.int64]
SIZE_MS, SLIDE_MS = 10_000, 2_000


class Counts(StatefulProcessor):
    """Keeps in a map how many events each open window has; a timer closes it."""

    def __init__(self, slide_ms: int) -> None:
        self._slide_ms = slide_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.counts = handle.getMapState("counts", "end_ms long", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        panes = Counter(row.at_ms // self._slide_ms for row in rows)
        new: Counter[int] = Counter()
        for pane, n in panes.items():
            for later in range(1, SIZE_MS // self._slide_ms + 1):
                new[(pane + later) * self._slide_ms] += n
        for end_ms, n in new.items():
            before = self.counts.getValue((end_ms,))
            if before is None:
                self.handle.registerTimer(end_ms)
            self.counts.updateValue((end_ms,), (n if before is None else n + before[0],))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        end_ms = expiredTimerInfo.getExpiryTimeInMs()
        stored = self.counts.getValue((end_ms,))
        assert stored is not None  # the timer came with it
        self.counts.removeKey((end_ms,))
        yield Row(key=key[0], window_ms=end_ms - SIZE_MS, n=stored[0])


def counts_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Do the same for all keys of a shard, in windows that slide."""
    ones = np.ones(batch.rows.num_rows, np.int64)
    key, pane, n = _sums(batch.groups.index, batch.rows["at_ms"].to_numpy() // SLIDE_MS, ones)
    windows = SIZE_MS // SLIDE_MS
    ends_ms = (pane[:, np.newaxis] + np.arange(1, windows + 1)) * SLIDE_MS
    old = stored_entries(batch, "counts")
    key, end_ms, n = _sums(
        np.concatenate([old["key"].to_numpy(), np.repeat(key, windows)]),
        np.concatenate([old["end_ms"].to_numpy(), ends_ms.ravel()]),
        np.concatenate([old["n"].to_numpy(), np.repeat(n, windows)]),
    )
    is_over = end_ms <= (batch.watermark_ms or 0)
    counts = pa.table({"end_ms": end_ms, "n": n, "key": key})
    store_entries(batch, "counts", counts.filter(~is_over))
    set_earliest(batch, key[~is_over], end_ms[~is_over])
    of_key = batch.keys.column(0).take(pa.array(key[is_over]))
    return pa.table({"key": of_key, "window_ms": end_ms[is_over] - SIZE_MS, "n": n[is_over]})


def _sums(key: _Ints, time: _Ints, n: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """Add up what has the same key and time; the result is sorted by them."""
    order = np.lexsort((time, key))
    key, time, n = key[order], time[order], n[order]
    is_first = np.ones(len(key), np.bool_)
    is_first[1:] = (key[1:] != key[:-1]) | (time[1:] != time[:-1])
    begins = np.flatnonzero(is_first)
    return key[begins], time[begins], np.add.reduceat(n, begins) if len(n) else n


def _in_windows(events: DataFrame, time: str = "at", size_ms: int = SIZE_MS) -> tuple[DataFrame, list[Column]]:
    """Return timed events with their windows, and two columns: when a window begins, and the last time in it.

    By the latter, which carries the watermark, events are late once their window is over, as in Spark's aggregations.
    """
    windowed = timed(events, time).withColumn("window", F.window(time, f"{size_ms} milliseconds"))
    return windowed, [F.unix_millis("window.start").alias("window_ms"), F.window_time("window").alias("until")]


def _bids_by(key: str, time: str, slide_ms: int, events: DataFrame) -> DataFrame:
    bids, (_, until) = _in_windows(of_kind(events, BID), time, slide_ms)
    return bids.select(F.col(key).alias("key"), until, F.unix_millis(time).alias("at_ms"))


def _hottest(counts: DataFrame) -> DataFrame:
    best = counts.groupBy("window_ms").agg(F.max(F.struct("n", (-F.col("key")).alias("older"))).alias("best"))
    return best.select("window_ms", (-F.col("best.older")).alias("auction"), "best.n")


def hottest_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Count, and give out only the shard's hottest auction of each window."""
    counts = counts_of_shard(batch)
    order = [("window_ms", "ascending"), ("n", "descending"), ("key", "ascending")]
    counts = counts.sort_by(order)
    window = counts["window_ms"].to_numpy()
    is_first = np.ones(len(window), np.bool_)
    is_first[1:] = window[1:] != window[:-1]
    return counts.filter(is_first)


def _hottest_on_spark(events: DataFrame) -> DataFrame:
    window = F.window("at", f"{SIZE_MS} milliseconds", f"{SLIDE_MS} milliseconds")
    counts = timed(of_kind(events, BID)).groupBy(window, "auction").agg(F.count("*").alias("n"))
    best = counts.groupBy("window").agg(F.max(F.struct("n", (-F.col("auction")).alias("older"))).alias("best"))
    return best.select(
        F.unix_millis("window.start").alias("window_ms"), (-F.col("best.older")).alias("auction"), "best.n"
    )


def _counts_on_spark(events: DataFrame) -> DataFrame:
    bids = timed(of_kind(events, BID), "arrived")
    counts = bids.groupBy(F.window("arrived", f"{SIZE_MS} milliseconds"), "bidder").agg(F.count("*").alias("n"))
    return _of_bidder(counts)


def _counts_in_one_line(events: DataFrame) -> DataFrame:
    bids = holdfast.stream(timed(of_kind(events, BID), "arrived")).groupBy("bidder")
    return _of_bidder(bids.window("arrived", f"{SIZE_MS} milliseconds").agg(n=holdfast.count()))


def _of_bidder(counts: DataFrame) -> DataFrame:
    return counts.select(F.col("bidder").alias("key"), F.unix_millis("window.start").alias("window_ms"), "n")


HOT_ITEMS = Query(
    number="5",
    title="hot items",
    keys=("key",),
    rows=partial(_bids_by, "auction", "at", SLIDE_MS),
    output="key long, window_ms long, n long",
    state="counts array<struct<end_ms: long, n: long>>",
    vectorised=hottest_of_shard,
    processor=partial(Counts, SLIDE_MS),
    then=_hottest,
    mode="update",
    on_spark=_hottest_on_spark,
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
COUNT_BY_BIDDER = Query(
    number="12",
    title="bids of a bidder in a window of (simulated) processing time",
    keys=("key",),
    rows=partial(_bids_by, "bidder", "arrived", SIZE_MS),
    output="key long, window_ms long, n long",
    in_one_line=_counts_in_one_line,
    processor=partial(Counts, SIZE_MS),
    on_spark=_counts_on_spark,
    result_of=("key", "window_ms"),
    sql="""
        SELECT bidder AS key, unix_millis(window.start) AS window_ms, count(*) AS n
        FROM bid
        GROUP BY bidder, window(arrived, '10 seconds')
    """,
)


_HIGHEST = "price long, at_us long, auction long, bidder long"


def _bids_by_window(events: DataFrame) -> DataFrame:
    bids, window = _in_windows(of_kind(events, BID))
    return bids.select(*window, "price", F.unix_micros("at").alias("at_us"), "auction", "bidder")


class Highest(StatefulProcessor):
    """Keeps the highest bid of a window, of equal ones the earliest; a timer closes it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.highest = handle.getValueState("highest", _HIGHEST)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        row = max(rows, key=lambda row: (row.price, -row.at_us))
        before = self.highest.get()
        if before is None or (row.price, -row.at_us) > (before[0], -before[1]):
            self.highest.update((row.price, row.at_us, row.auction, row.bidder))
        if before is None:
            self.handle.registerTimer(key[0] + SIZE_MS)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        highest = self.highest.get()
        assert highest is not None  # the timer came with it
        price, at_us, auction, bidder = highest
        self.highest.clear()
        yield Row(window_ms=key[0], price=price, at_us=at_us, auction=auction, bidder=bidder)


def highest_of_shard(batch: holdfast.ShardBatch) -> pa.Table:
    """Do the same for all windows of a shard."""
    old = batch.state.get()
    height = np.empty(batch.rows.num_rows, np.int64)
    height[np.lexsort((-batch.rows["at_us"].to_numpy(), batch.rows["price"].to_numpy()))] = np.arange(len(height))
    picked = batch.groups.last(pa.array(np.arange(len(height))), order_by=pa.array(height))
    new = batch.rows.select(old.column_names).take(picked)
    is_equal = pc.and_(pc.equal(new["price"], old["price"]), pc.less(new["at_us"], old["at_us"]))
    is_higher = pc.or_(pc.greater(new["price"], old["price"]), is_equal)
    takes = pc.fill_null(is_higher, pc.invert(batch.state.exists()))
    highest = pa.table({name: pc.if_else(takes, new[name], old[name]) for name in old.column_names})
    ends_ms = pc.add(batch.keys["window_ms"], SIZE_MS)
    is_over = pc.less_equal(ends_ms, batch.watermark_ms or 0)
    stays = pc.invert(is_over)
    batch.state.put(highest, where=stays)
    batch.state.delete(where=is_over)
    batch.timers.set(pc.subtract(ends_ms, 1), where=stays)
    return highest.append_column("window_ms", batch.keys["window_ms"]).filter(is_over)


def _highest_on_spark(events: DataFrame) -> DataFrame:
    bids = timed(of_kind(events, BID)).groupBy(F.window("at", f"{SIZE_MS} milliseconds"))
    earlier = (-F.unix_micros("at")).alias("earlier")
    best = bids.agg(F.max(F.struct("price", earlier, "auction", "bidder")).alias("best"))
    at_us = (-F.col("best.earlier")).alias("at_us")
    return best.select(
        F.unix_millis("window.start").alias("window_ms"), "best.price", at_us, "best.auction", "best.bidder"
    )


HIGHEST_BID = Query(
    number="7",
    title="highest bid",
    keys=("window_ms",),
    rows=_bids_by_window,
    output=f"window_ms long, {_HIGHEST}",
    state=_HIGHEST,
    vectorised=highest_of_shard,
    processor=Highest,
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


GAP_US = 10_000_000


def _people_and_sellers(events: DataFrame) -> DataFrame:
    wanted, window = _in_windows(events.where(F.col("kind") != BID))
    return wanted.select(F.coalesce("person", "seller").alias("person"), *window, "name")


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


def _over_ms(last_us: int) -> int:
    """Return the first watermark behind which no bid can join a session."""
    return (last_us + GAP_US) // 1000 + 1


def _sessions_on_spark(events: DataFrame) -> DataFrame:
    bids = timed(of_kind(events, BID))
    sessions = bids.groupBy(F.session_window("at", f"{GAP_US} microseconds"), "bidder").agg(F.count("*").alias("n"))
    return _of_session(sessions)


def _sessions_in_one_line(events: DataFrame) -> DataFrame:
    bids = holdfast.stream(timed(of_kind(events, BID))).groupBy("bidder")
    return _of_session(bids.session("at", f"{GAP_US} microseconds").agg(n=holdfast.count()))


def _of_session(sessions: DataFrame) -> DataFrame:
    first_us, end_us = F.unix_micros("session_window.start"), F.unix_micros("session_window.end")
    return sessions.select("bidder", first_us.alias("first_us"), (end_us - GAP_US).alias("last_us"), "n")


USER_SESSIONS = Query(
    number="11",
    title="bids of a bidder in a session",
    keys=("bidder",),
    rows=_bids,
    output=f"bidder long, {_SESSION}",
    in_one_line=_sessions_in_one_line,
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
