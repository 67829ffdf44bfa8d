"""The stateful examples: both forms give the same in each micro-batch, and altogether what a plain loop finds."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pyspark.sql import Row

from holdfast.examples.stateful import deduplication, fraud, sessions, top_bids
from holdfast.testing import TwsTester
from tests.tiers import repetitions
from tests.unit.examples.side_by_side import Rows, SideBySide, on_time

MINUTE_MS = 60_000
END_MS = 1 << 50
seeds = pytest.mark.parametrize("seed", repetitions(1, 40))


class Stream:
    """Micro-batches of events, out of order; the watermark follows the newest one that was seen."""

    def __init__(self, generator: np.random.Generator, delay_ms: int) -> None:
        self._generator = generator
        self._delay_ms = delay_ms
        self.events: Rows = []

    def micro_batches(self, rows: list[Rows]) -> Iterator[tuple[Rows, int]]:
        """Yield the rows of each that are not late, and its watermark; at the end the watermark passes everything."""
        watermark_ms = late_ms = 0
        newest_ms = 0
        for given in rows:
            seen = on_time(given, late_ms)
            self.events += seen
            yield seen, watermark_ms
            late_ms = watermark_ms
            newest_ms = max([newest_ms, *(row[-1] for row in given)])
            watermark_ms = max(watermark_ms, newest_ms - self._delay_ms)
        yield [], watermark_ms
        yield [], END_MS

    def times(self, n: int, batches: int, span_ms: int, spread_ms: int) -> list[list[int]]:
        """Return the times of events by micro-batch: they go forward, with a spread."""
        starts = np.arange(batches) * span_ms + 10 * span_ms
        return [(start + self._generator.integers(0, spread_ms, n)).tolist() for start in starts]


def sessions_by_loop(clicks: Rows) -> Rows:
    """Return what a loop over all clicks in order of time finds."""
    by_user: dict[Any, list[int]] = defaultdict(list)
    for user, at_ms in clicks:
        by_user[user].append(at_ms)
    found = []
    for user, times in by_user.items():
        times.sort()
        cuts = [0, *(i for i in range(1, len(times)) if times[i] - times[i - 1] > sessions.GAP_MS), len(times)]
        found += [(user, times[a], times[b - 1], b - a) for a, b in itertools.pairwise(cuts)]
    return sorted(found, key=repr)


@pytest.mark.slow(1)
@seeds
def test_sessions(seed: int) -> None:
    """Each click that is not late is in one session, whenever it comes; nothing is left when all are over."""
    stream = Stream(generator := np.random.default_rng(seed), 10 * MINUTE_MS)
    side = SideBySide("user string, at_ms long", sessions.SESSIONS)
    side.add_processor(sessions.Sessions(), "EventTime")
    side.add_vectorised(sessions.sessions_of_shard, sessions.STATE, "EventTime")
    times = stream.times(4, 40, 10 * MINUTE_MS, 45 * MINUTE_MS)
    batches = [[(f"u{generator.integers(9)}", at_ms // MINUTE_MS * MINUTE_MS) for at_ms in some] for some in times]
    found = [row for rows, watermark_ms in stream.micro_batches(batches) for row in side.run(rows, watermark_ms)]
    assert sorted(found, key=repr) == sessions_by_loop(stream.events)
    assert len(found) > 20
    assert sum(map(len, batches)) > len(stream.events), "some were late"
    assert side.stored() == 0


def test_a_session_is_over_when_the_watermark_says_so() -> None:
    """A click at the very end of the gap joins; the timer of what was the end then finds nothing."""
    tester = TwsTester(sessions.Sessions(), timeMode="EventTime", eventTimeExtractor=lambda row: row.at_ms)
    tester.test("ann", [Row(at_ms=1), Row(at_ms=sessions.GAP_MS + 1)])
    tester.test("ann", [Row(at_ms=5 * sessions.GAP_MS)])
    assert tester.setWatermark(2 * sessions.GAP_MS) == []
    [over] = tester.setWatermark(2 * sessions.GAP_MS + 1)
    assert (over.first_ms, over.last_ms, over.clicks) == (1, sessions.GAP_MS + 1, 2)
    assert tester.peekListState("open", "ann") == [(5 * sessions.GAP_MS, 5 * sessions.GAP_MS, 1)]


@pytest.mark.slow(1)
@seeds
def test_deduplication(seed: int) -> None:
    """An order is given out when it was not given out for a day, with its first delivery in the micro-batch."""
    generator = np.random.default_rng(seed)
    side = SideBySide(deduplication.ORDERS, deduplication.ORDERS)
    side.add_processor(deduplication.FirstDeliveries(), "ProcessingTime")
    side.add_vectorised(deduplication.first_deliveries_of_shard, "delivery long", "None", deduplication.DAY_MS)
    seen_ms: dict[int, int] = {}
    deliveries: Counter[int] = Counter()
    given_twice = 0
    for now_ms in range(0, 3 * deduplication.DAY_MS, deduplication.DAY_MS // 8):
        rows: Rows = []
        for order in generator.integers(0, 40, 12).tolist():
            deliveries[order] += 1
            rows.append((order, f"item {order}", deliveries[order]))
        expected = {
            row[0]: row for row in reversed(rows) if now_ms - seen_ms.get(row[0], -END_MS) >= deduplication.DAY_MS
        }
        given_twice += len(expected.keys() & seen_ms)
        seen_ms |= dict.fromkeys(expected, now_ms)
        generator.shuffle(rows)
        assert side.run(rows, now_ms) == sorted(expected.values(), key=repr)
    assert given_twice
    side.run([], 9 * deduplication.DAY_MS)
    assert side.stored() == 0


@pytest.mark.slow(1)
@seeds
def test_fraud(seed: int) -> None:
    """Each payment without its confirmation is reported once, and too much whenever a card with rows waits for it."""
    generator = np.random.default_rng(seed)
    stream = Stream(generator, MINUTE_MS)
    side = SideBySide("card string, payment string, cents long, at_ms long", fraud.ALERTS)
    side.add_processor(fraud.Watch(), "EventTime")
    side.add_vectorised(fraud.alerts_of_shard, fraud.STATE, "EventTime")
    batches: list[Rows] = [[] for _ in range(40)]
    for number, times in enumerate(stream.times(4, 30, 2 * MINUTE_MS, 2 * MINUTE_MS)):
        for i, at_ms in enumerate(times):
            card, payment = f"c{generator.integers(4)}", f"p{number}-{i}"
            batches[number].append((card, payment, int(generator.integers(1, 90)) * 1000, at_ms))
            if generator.random() < 0.8:  # its confirmation, perhaps earlier or in a later micro-batch
                come = max(0, number + int(generator.integers(-1, 4)))
                batches[come].append((card, payment, None, at_ms + int(generator.integers(0, 4 * MINUTE_MS))))
    waiting: dict[tuple[str, str], tuple[int | None, int]] = {}
    kinds: Counter[str] = Counter()
    for rows, watermark_ms in stream.micro_batches(batches):
        expected: Rows = []
        for card, payment, cents, at_ms in rows:
            if waiting.pop((card, payment), None) is None:
                waiting[card, payment] = cents, at_ms + fraud.WAIT_MS
        for card in {row[0] for row in rows}:
            total = sum(cents or 0 for (of, _), (cents, _) in waiting.items() if of == card)
            expected += [(card, "too much", None, total)] if total > fraud.LIMIT_CENTS else []
        for (card, payment), (cents, due_ms) in list(waiting.items()):
            if due_ms <= watermark_ms:
                del waiting[card, payment]
                expected += [(card, "not confirmed", payment, cents)] if cents is not None else []
        assert side.run(rows, watermark_ms) == sorted(expected, key=repr)
        kinds.update(alert for _, alert, _, _ in expected)
    assert min(kinds.values()) > 3
    assert len(kinds) == 2
    assert side.stored() == 0


@seeds
def test_top_bids(seed: int) -> None:
    """The top of an auction is given out where it differs from the one before, ties and equal bids included."""
    generator = np.random.default_rng(seed)
    side = SideBySide(top_bids.BIDS, top_bids.TOP)
    side.add_processor(top_bids.TopBids(), "None")
    side.add_vectorised(top_bids.top_bids_of_shard, top_bids.STATE, "None")
    bids: dict[int, Rows] = defaultdict(list)
    unchanged = 0
    for _ in range(12):
        batch = zip(*(generator.integers(0, n, 15).tolist() for n in (6, 4, 30)), strict=True)
        rows = [(auction, f"b{bidder}", price) for auction, bidder, price in batch]
        expected: Rows = []
        for auction in {row[0] for row in rows}:
            before = sorted(bids[auction], key=lambda bid: (-bid[0], bid[1]))[: top_bids.PLACES]
            bids[auction] += [(price, bidder) for of, bidder, price in rows if of == auction]
            top = sorted(bids[auction], key=lambda bid: (-bid[0], bid[1]))[: top_bids.PLACES]
            if top != before:
                expected += [(auction, place, bidder, price) for place, (price, bidder) in enumerate(top, 1)]
            unchanged += top == before
        assert side.run(rows) == sorted(expected, key=repr)
    assert unchanged > 5
