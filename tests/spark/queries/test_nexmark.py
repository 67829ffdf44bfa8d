"""Nexmark, the stateful examples and the sessions of flights in Spark find what SQL and pandas find."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, GroupedData, SparkSession

import holdfast
from holdfast.benches.nexmark.events import AUCTION, BID, FIRST_ID, HOT, LEAD, PERSON, Mix, events
from holdfast.benches.nexmark.job import QUERIES, Nexmark
from holdfast.benches.runs.equality import compare, small
from holdfast.examples.flights import data
from holdfast.examples.flights import sessions as flight_sessions
from holdfast.examples.stateful import deduplication, fraud, local, migration, sessions, top_bids
from tests import flights_by_pandas
from tests.spark.conftest import Lab
from tests.tiers import LONG, cases

pytestmark = pytest.mark.spark


MIX = Mix(per_second=10_000, people=1_000, auctions=100, disorder_ms=100, seed=1)
EVENTS = 100_000
BACKENDS = ("memory", "filesystem", "rocksdb")


@pytest.fixture(scope="module")
def made(spark: SparkSession) -> pa.Table:
    return _events(spark, 0, EVENTS).sort_by("number")


def _events(spark: SparkSession, first: int, end: int, mix: Mix = MIX) -> pa.Table:
    numbers = spark.range(first, end).withColumnRenamed("id", "number")
    return events(numbers, mix, "number").toArrow()


@pytest.mark.slow(20)
@pytest.mark.all
def test_an_event_is_made_of_its_number_alone(spark: SparkSession, made: pa.Table) -> None:
    """Another stream, or another cut into micro-batches, has the same events; another seed has others."""
    again = _events(spark, 500, 1_500).sort_by("number")
    assert again.equals(made.slice(500, 1_000))
    assert not _events(spark, 500, 1_500, Mix(10_000, 1_000, 100, 100, seed=2)).sort_by("number").equals(again)


@pytest.mark.slow(20)
def test_one_person_and_three_auctions_come_with_46_bids(made: pa.Table) -> None:
    """Numbered one after another, each with the columns of its kind."""
    counts = {kind: made.filter(pc.field("kind") == kind) for kind in (PERSON, AUCTION, BID)}
    assert [len(table) for table in counts.values()] == [EVENTS // 50, EVENTS // 50 * 3, EVENTS // 50 * 46]
    for kind, column in ((PERSON, "person"), (AUCTION, "auction")):
        assert counts[kind][column].to_pylist() == list(range(FIRST_ID, FIRST_ID + len(counts[kind])))
    own = {
        PERSON: ["person", "name"],
        AUCTION: ["auction", "seller", "category", "expires"],
        BID: ["auction", "bidder", "price", "channel", "url"],
    }
    of_all = ["number", "kind", "at", "arrived"]
    for kind, table in counts.items():
        assert [name for name in table.column_names if table[name].null_count == 0] == [*of_all, *own[kind]]


@pytest.mark.slow(20)
def test_half_of_the_bids_go_to_a_hot_auction_and_most_come_from_a_hot_bidder(made: pa.Table) -> None:
    """The others name auctions and people that are, were lately, or come soon."""
    auctions, bids = (made.filter(pc.field("kind") == kind) for kind in (AUCTION, BID))
    epoch = bids["number"].to_numpy() // 50
    for column, newest, hot, share, window in (
        ("auction", epoch * 3 + 2, 0, 0.5, MIX.auctions),
        ("bidder", epoch, 1, 0.75, MIX.people),
    ):
        named = bids[column].to_numpy() - FIRST_ID
        is_hot = named == newest - newest % HOT + hot
        assert np.mean(is_hot) == pytest.approx(share, abs=0.02)
        behind = newest[~is_hot] - named[~is_hot]
        assert behind.max() <= window
        assert -LEAD <= behind.min() < 0
        assert named.min() >= 0
    sellers = auctions["seller"].to_numpy() - FIRST_ID
    assert np.mean(sellers % HOT == 0) == pytest.approx(0.75, abs=0.02)
    assert sorted(set(auctions["category"].to_pylist())) == [10, 11, 12, 13, 14]
    prices = bids["price"].to_numpy()
    assert 100 <= prices.min() < prices.max() <= 100_000_000


@pytest.mark.slow(20)
def test_time_goes_on_and_back_at_most_by_the_disorder(made: pa.Table) -> None:
    """So no event is late, and each has a time of its own."""
    at_us, arrived_us = (made[name].cast(pa.int64()).to_numpy() for name in ("at", "arrived"))
    assert (np.diff(arrived_us) == 100).all()
    back_us = np.maximum.accumulate(at_us) - at_us
    assert 0 < back_us.max() <= MIX.disorder_ms * 1000
    assert len(np.unique(at_us)) == EVENTS
    auctions = made.filter(pc.field("kind") == AUCTION)
    open_ms = (auctions["expires"].cast(pa.int64()).to_numpy() - auctions["at"].cast(pa.int64()).to_numpy()) / 1000
    assert 1 <= open_ms.min() < open_ms.max() <= MIX.longest_ms
    assert np.mean(open_ms) == pytest.approx(MIX.auctions * 50 / 3 / 10, rel=0.05)


def _engines(number: str) -> list[str]:
    """Return the engines to compare: in ``make test`` one backend, in all ways, and Spark's own operators."""
    by_key = QUERIES[number].by_key is not None
    found = [f"nexmark-{backend}{way}" for backend in cases(BACKENDS) for way in ("", "-by-key")[: 1 + by_key]]
    is_on_spark = not by_key or hasattr(GroupedData, "transformWithState")  # by Row, since Spark 4.1
    return [*found, "nexmark-spark"] if is_on_spark else found


@pytest.mark.slow(20)
@pytest.mark.all
@pytest.mark.parametrize("number", cases(list(QUERIES)))
def test_all_engines_find_what_sql_finds(lab: Lab, number: str) -> None:
    """Before a time counts, the suite does this with more events, in a process of its own."""
    job = small(Nexmark(query=number), rows=2_000, batches=4 if LONG else 2)
    found = compare(lab.spark, job, _engines(number), lab.folder, {"spark.holdfast.local.dir": str(lab.local)})
    assert found["equal"], found
    assert found["rows"] >= 4


# By example: its two queries, its columns, and how many rows it prints.
EXAMPLES: list[tuple[ModuleType, Any, Any, str, int]] = [
    (sessions, sessions.sessions, sessions.vectorised_sessions, sessions.CLICKS, 4),
    (deduplication, deduplication.first_deliveries, deduplication.vectorised_first_deliveries, deduplication.ORDERS, 4),
    (fraud, fraud.alerts, fraud.vectorised_alerts, fraud.EVENTS, 3),
    (top_bids, top_bids.top_bids, top_bids.vectorised_top_bids, top_bids.BIDS, 9),
]


@pytest.mark.slow(20)
@pytest.mark.usefixtures("state_store")
@pytest.mark.all
@pytest.mark.parametrize("example", cases(EXAMPLES), ids=lambda example: example[0].__name__.rpartition(".")[2])
def test_both_forms_give_the_same(lab: Lab, example: tuple[ModuleType, Any, Any, str, int]) -> None:
    """What a user copies runs: it prints what it says, in the same micro-batches, by key and for a whole shard."""
    module, by_key, vectorised, columns, count = example
    forms = [(by_key, module is not deduplication), (vectorised, True)]
    found = []
    for query, ends in forms:
        lab.configure({"state.dir": str(lab.folder / f"state-of-{query.__name__}")})
        batches = local.run(lab.spark, query, columns, module.BATCHES, lab.folder, ends=ends)
        found.append([sorted(rows, key=repr) for rows in batches])
    longest = max(map(len, found))
    first, second = ([*rows, *[[]] * (longest - len(rows))] for rows in found)
    assert first == second
    assert sum(map(len, first)) == count
    [(number, row)] = re.findall(r"micro-batch (\d+): (.*)", module.__doc__ or "")
    assert row in [str(one.asDict()) for one in first[int(number)]]


@pytest.mark.slow(20)
@pytest.mark.usefixtures("state_store")
@pytest.mark.all
def test_sessions_in_one_line_are_those_by_hand(lab: Lab) -> None:
    by_hand = local.run(lab.spark, sessions.vectorised_sessions, sessions.CLICKS, sessions.BATCHES, lab.folder)
    in_one_line = local.run(lab.spark, sessions.sessions_by_operator, sessions.CLICKS, sessions.BATCHES, lab.folder)

    def in_ms(moment: datetime) -> int:
        return round(moment.timestamp() * 1000)

    found = [sorted((r.user, in_ms(r.first), in_ms(r.last), r.clicks) for r in rows) for rows in in_one_line]
    assert found == [sorted(map(tuple, rows)) for rows in by_hand]


@pytest.mark.slow(20)
@pytest.mark.usefixtures("state_store")
@pytest.mark.all
@pytest.mark.since("4.1")
def test_a_query_moves_from_sparks_operator_with_its_state(lab: Lab) -> None:
    """The new query counts on from what the old one had counted, also for users that it has not seen yet."""
    before, after = migration.migrate(lab.spark, lab.folder)
    assert sorted(map(tuple, before[-1])) == [("ann", 3, 2), ("cem", 1, 1)]
    assert [sorted(map(tuple, rows)) for rows in after] == [
        [("ann", 4, 3), ("dan", 1, 1)],
        [("bob", 2, 1), ("dan", 2, 2)],
    ]
    state = holdfast.read_state(lab.spark, lab.folder / "new/going_on", "visits", table="visits").to_pylist()
    assert {row["user"]: row["n"] for row in state} == {"ann": 4, "bob": 2, "cem": 1, "dan": 2}
    [row] = re.findall(r"on holdfast: (.*)", migration.__doc__ or "")
    assert row in [str(one.asDict()) for one in after[0]]


@pytest.fixture(scope="module")
def flights() -> pd.DataFrame:
    return data.load_flights(3000)


def source(lab: Lab, flights: pd.DataFrame) -> DataFrame:
    data.write_files(flights, lab.folder / "input", 3)
    return lab.source(data.TIMED_FLIGHT_COLUMNS)


def rows_of(frame: pd.DataFrame) -> set[tuple[Any, ...]]:
    return set(frame[["tailnum", *flight_sessions.Chain._fields]].itertuples(index=False, name=None))


@pytest.mark.all
@pytest.mark.parametrize(
    "chains", [flight_sessions.chains, flight_sessions.vectorised_chains], ids=["by key", "vectorised"]
)
def test_chains_end_after_four_hours(lab: Lab, flights: pd.DataFrame, chains: Callable[[DataFrame], DataFrame]) -> None:
    """Each chain has come out once or is still in the state; what pandas finds and what is there are the same."""
    batches = lab.run(chains(source(lab, flights)), mode="append")
    ended = pd.DataFrame([row for batch in batches for row in batch])
    still_open = holdfast.read_state(lab.spark, lab.folder / "query", "chains").to_pandas()
    expected = flights_by_pandas.expected_chains(flights, flight_sessions.GAP_MS)
    assert len(ended) + len(still_open) == len(expected)
    assert rows_of(pd.concat([ended, still_open])) == rows_of(expected)
    newest_ms = expected["last_ms"].max()
    assert (still_open["last_ms"] >= newest_ms - flight_sessions.GAP_MS - 3_600_000).all()
    assert ended["legs"].max() > 1
