"""Metrics in the query's own progress, and as a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from tests.repetitions import sample
from tests.spark.conftest import Lab

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark

FIRST = [("a", 1), ("b", 2), ("a", 3), (None, 4)]
SECOND = [("a", 10), ("c", 20), (None, 30), ("", 40)]


def ended(lab: Lab, frame: DataFrame, query: str = "query") -> StreamingQuery:
    """Run a query over the files that it has not read yet."""
    writer = frame.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    started = writer.option("checkpointLocation", str(lab.folder / query)).start()
    started.awaitTermination()
    return started


def shown(query: StreamingQuery, *names: str) -> list[tuple[Any, ...]]:
    """Return some metrics by micro-batch."""
    return [tuple(row[name] for name in names) for row in holdfast.metrics(query).collect()]


@pytest.mark.parametrize("transport", sample(["packed", "rows"]))
def test_progress_has_what_each_micro_batch_has_done(lab: Lab, transport: str) -> None:
    lab.configure({"transport": transport})
    lab.feed(FIRST)
    lab.feed(SECOND)
    query = ended(lab, lab.totals())
    for p in query.recentProgress:
        print(p.batchId, p.observedMetrics)
    assert shown(query, "operator", "batchId", "rows", "keys", "keys_new", "keys_removed", "state_rows_put") == [
        ("totals", 0, 4, 3, 3, 0, 3),
        ("totals", 1, 4, 4, 2, 0, 4),
    ]
