"""A query that fails, and one that goes on, as the page and the command see them: from what its tasks have stored."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException

import holdfast
from tests.spark.conftest import Lab, count_and_sum
from tests.unit.holdfast.commands.state_dir import document, run
from tests.unit.holdfast.ui.serving import TOKEN, opened

pytestmark = [pytest.mark.spark, pytest.mark.slow(20)]


def refuse_large(batch: holdfast.ShardBatch) -> pa.Table:
    """Fail for one value of the second micro-batch."""
    if 13 in batch.rows.column("v").to_pylist():
        raise ValueError("13 is no amount")
    return count_and_sum(batch)


def inspected(lab: Lab, status: int = 0) -> dict[str, Any]:
    """Return what the command says of the one query, by its location, and end with as exit status."""
    location = lab.folder / "query"
    (found,) = document("inspect", lab.folder / "durable", "--checkpoint-location", location, status=status)["queries"]
    return found


def seen(lab: Lab, view: str = "") -> str:
    """Return a page as a reader sees it."""
    with opened(lab.folder / "durable", lab.folder / "query", local_dir=str(lab.local)) as page:
        answer = page.get(f"/{TOKEN}/{view}")
        assert answer.status_code == 200
        return " ".join(re.sub(r"<[^>]+>", " ", answer.text).split())


def test_a_failed_micro_batch_is_seen_until_it_is_committed(lab: Lab) -> None:
    """Its error in words, its shard, and since when; the run that commits it ends that."""
    for rows in ([("ann", 1), ("bob", 2)], [("ann", 13)], [("ann", 5)]):
        lab.feed(rows)
    with pytest.raises(StreamingQueryException):
        lab.run(lab.totals(func=refuse_large))
    failing = inspected(lab, status=1)
    assert (failing["state"], failing["why"]) == (
        "failing",
        "Micro-batch 1 failed and has not been committed since.",
    )
    assert failing["failure"]["error"] == "ValueError: 13 is no amount"
    assert failing["failure"]["what"] == "micro-batch 1"
    shown = seen(lab)
    assert "Failing since" in shown
    assert "micro-batch 1 failed" in shown
    assert "ValueError: 13 is no amount" in shown
    shard = int(failing["failure"]["shard"][-4:])
    assert "ValueError: 13 is no amount" in seen(lab, f"0/totals/shard/{shard}")
    lab.run(lab.totals())
    going = inspected(lab)
    assert (going["state"], going["committed"], going["failure"]) == ("running", 2, None)
    assert going["why"].startswith("Micro-batch 2 was committed")
    shown = seen(lab)
    assert "Running since" in shown
    assert "13 is no amount" not in shown
    assert "Rows a second: unknown" not in shown
    shown = run("inspect", lab.folder / "durable", "--checkpoint-location", lab.folder / "query").stdout
    assert "is running since" in shown
    assert "13 is no amount" not in shown


@pytest.mark.all
def test_only_failures_cost_requests(lab: Lab) -> None:
    """A query without failures stores nothing of them, and one that fails again and again one object a shard."""
    lab.feed([("ann", 1)])
    lab.run(lab.totals())
    assert not list((lab.folder / "durable").rglob("troubles"))
    lab.feed([("ann", 13)])
    for _ in range(2):
        with pytest.raises(StreamingQueryException):
            lab.run(lab.totals(func=refuse_large))
    assert len(list((lab.folder / "durable").rglob("troubles/*"))) == 1
