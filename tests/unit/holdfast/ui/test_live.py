"""The last micro-batches, over several executors."""

from __future__ import annotations

from holdfast.spark_integration.client.recent import RecentBatch, over_executors
from holdfast.ui.site import BATCHES_MAX, SHOWN_MS, Live


def batch(number: int, query: str = "q", **values: int) -> RecentBatch:
    return RecentBatch(query, "totals", number, 1_000 * number, 2, values)


def test_executors_are_added_up_and_lags_are_not() -> None:
    """Rows of all executors count; the largest lag is the operator's."""
    found = over_executors(
        [
            batch(7, rows=10, snapshot_lag_versions=3),
            batch(7, rows=5, snapshot_lag_versions=9, commit_us=1_500),
            batch(8, rows=1),
        ]
    )
    assert [(one.batch_id, one.shards, one.values["rows"]) for one in found] == [(8, 2, 1), (7, 4, 15)]
    assert found[1].values["snapshot_lag_versions"] == 9
    assert found[1].ms("commit") == 1.5


def test_the_last_ones_are_kept() -> None:
    """However many a server remembers, the page shows the newest."""
    found = Live(lambda: [batch(n) for n in range(100)]).of_operator("q", "totals")
    assert [one.batch_id for one in found] == list(range(99, 99 - BATCHES_MAX, -1))


def test_servers_are_asked_now_and_then() -> None:
    """Many who look at once cost a query one request; another query's micro-batches are not shown."""
    asked, now = [], [0]

    def read() -> list[RecentBatch]:
        asked.append(now[0])
        return [batch(len(asked)), batch(99, query="another")]

    live = Live(read, lambda: now[0])
    assert [one.batch_id for _ in range(5) for one in live.of_operator("q", "totals")] == [1] * 5
    now[0] += SHOWN_MS
    assert [one.batch_id for one in live.of_operator("q", "totals")] == [2]
    assert live.of_operator("q", "other") == []
    assert len(asked) == 2


def test_servers_that_answer_late_are_asked_less_often() -> None:
    """One that hangs holds up a page now and then, not each."""
    asked, now = [], [0]

    def read() -> list[RecentBatch]:
        asked.append(now[0])
        now[0] += 2_000
        return []

    live = Live(read, lambda: now[0])
    for _ in range(20):
        live.of_operator("q", "totals")
        now[0] += 1_000
    assert asked == [0]
    live.of_operator("q", "totals")
    assert asked == [0, 22_000]
