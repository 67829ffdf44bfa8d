"""Nexmark in Spark: its events are what their numbers say, and every query finds what SQL over whole tables finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import GroupedData

from holdfast.benches.nexmark.equality import compare, small
from holdfast.benches.nexmark.events import AUCTION, BID, FIRST_ID, HOT, LEAD, PERSON, Mix, events
from holdfast.benches.nexmark.job import QUERIES, Nexmark
from tests.spark.conftest import Lab
from tests.tiers import ALL, LONG, cases

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow(20)]

MIX = Mix(per_second=10_000, people=1_000, auctions=100, disorder_ms=100, seed=1)
EVENTS = 100_000
BACKENDS = ("memory", "filesystem", "rocksdb")


@pytest.fixture(scope="module")
def made(spark: SparkSession) -> pa.Table:
    return _events(spark, 0, EVENTS).sort_by("number")


def _events(spark: SparkSession, first: int, end: int, mix: Mix = MIX) -> pa.Table:
    numbers = spark.range(first, end).withColumnRenamed("id", "number")
    return events(numbers, mix, "number").toArrow()


@pytest.mark.all
def test_an_event_is_made_of_its_number_alone(spark: SparkSession, made: pa.Table) -> None:
    """Another stream, or another cut into micro-batches, has the same events; another seed has others."""
    again = _events(spark, 500, 1_500).sort_by("number")
    assert again.equals(made.slice(500, 1_000))
    assert not _events(spark, 500, 1_500, Mix(10_000, 1_000, 100, 100, seed=2)).sort_by("number").equals(again)


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
    """Return the engines to compare: in ``make test`` one backend, in both ways, and Spark's own operators."""
    backends = cases(BACKENDS)
    found = [f"nexmark-{backend}{way}" for backend in backends for way in ("", "-by-key")]
    if not hasattr(GroupedData, "transformWithState"):  # before Spark 4.1
        return found if QUERIES[number].on_spark is None else [*found, "nexmark-spark"]
    return [*found, "nexmark-spark", *(["nexmark-spark-by-key"] if ALL else [])]


@pytest.mark.all
@pytest.mark.parametrize("number", cases(list(QUERIES)))
def test_all_engines_find_what_sql_finds(lab: Lab, number: str) -> None:
    """Before a time counts, the suite does this with more events, in a process of its own."""
    job = small(Nexmark(query=number), rows=2_000, batches=4 if LONG else 2)
    found = compare(lab.spark, job, _engines(number), lab.folder, {"spark.holdfast.local.dir": str(lab.local)})
    assert found["equal"], found
    assert found["rows"] >= 4
