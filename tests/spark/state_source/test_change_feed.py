"""What changed between two micro-batches: applied to the state before, it gives the state after."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import holdfast
from holdfast.errors import NotFoundError
from tests.spark.conftest import Lab
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark
State = dict[Any, tuple[Any, ...]]


def last_or_forget(batch: holdfast.ShardBatch) -> pa.Table:
    """Keep count and sum of each key, and forget those whose rows are negative."""
    total = batch.groups.sum("v")
    batch.state.put(n=batch.groups.count(), total=total)
    batch.state.delete(where=pa.compute.less(total, 0))
    return batch.keys.append_column("n", batch.groups.count()).append_column("total", total)


def feed(lab: Lab, first: int, last: int | None = None, **options: Any) -> DataFrame:
    return holdfast.state(
        lab.spark,
        lab.folder / "query",
        "totals",
        readChangeFeed=True,
        changeStartBatchId=first,
        changeEndBatchId=last,
        **options,
    )


def state(lab: Lab, batch: int) -> State:
    rows = holdfast.state(lab.spark, lab.folder / "query", "totals", batchId=batch).collect() if batch >= 0 else []
    return {row["key"]: (row["n"], row["total"], row["shard"]) for row in rows}


def applied(before: State, changes: list[Any]) -> State:
    after = dict(before)
    for row in sorted(changes, key=lambda row: row["batch_id"]):
        assert row["change_type"] in ("update", "delete")
        if row["change_type"] == "update":
            after[row["key"]] = (row["n"], row["total"], row["shard"])
        else:
            assert (row["n"], row["total"]) == (None, None)
            after.pop(row["key"], None)
    return after


@pytest.mark.parametrize("carried", cases(["0", "64k"], quick=1))
def test_changes_applied_to_a_state_give_the_next(lab: Lab, carried: str) -> None:
    """Between any two micro-batches, with commits of their own and with those that travel together."""
    lab.configure({"commit.carriedBytes": carried})
    chance = Random(0)
    keys = [None, "", *(f"k{i}" for i in range(10))]
    batches = 5
    for _ in range(batches):
        lab.feed([(chance.choice(keys), chance.choice([-5, 1, 2])) for _ in range(chance.randint(1, 9))])
    lab.run(lab.totals(func=last_or_forget))
    states = {batch: state(lab, batch) for batch in range(-1, batches)}
    ranges = [(first, last) for first in range(batches) for last in range(first, batches)]
    for first, last in cases(ranges, quick=6):
        changes = feed(lab, first, last)
        assert changes.columns == ["batch_id", "change_type", "key", "n", "total", "shard"]
        rows = changes.collect()
        assert applied(states[first - 1], rows) == states[last], (first, last)
        assert all(first <= row["batch_id"] <= last for row in rows)
        if carried == "0":
            # Each micro-batch by itself: exactly the keys that it wrote.
            for batch in range(first, last + 1):
                names = {row["key"] for row in rows if row["batch_id"] == batch}
                written = {key for key in keys if states[batch].get(key) != states[batch - 1].get(key)}
                assert written <= names


@pytest.mark.all
def test_nothing_has_changed_after_the_last_micro_batch(lab: Lab) -> None:
    lab.feed([("a", 1)])
    lab.run(lab.totals())
    assert feed(lab, 1).collect() == []
    assert [row["key"] for row in feed(lab, 0, columns=["key"]).collect()] == ["a"]


def test_a_feed_that_begins_too_early_says_where_it_may(lab: Lab) -> None:
    """Commits that were cleaned up are named before any task runs, and in the task if they go meanwhile."""
    lab.configure({"commit.carriedBytes": "0", "shards": "1"})
    for batch in range(4):
        lab.feed([("a", batch), (f"k{batch}", 1)])
    lab.run(lab.totals())
    early = feed(lab, 0)
    commits: list[Path] = lab.commits()
    assert len(commits) == 4
    for commit in commits[:2]:
        commit.unlink()
    with pytest.raises(NotFoundError, match="begin with micro-batch 2 or a later one"):
        feed(lab, 0)
    with pytest.raises(PySparkException, match="begin with micro-batch 2 or a later one"):
        early.collect()
    assert {row["key"] for row in feed(lab, 2).collect()} == {"a", "k2", "k3"}
