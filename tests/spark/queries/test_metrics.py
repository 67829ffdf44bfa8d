"""Metrics in the query's own progress, and as a DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.state import GroupState

import holdfast
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.measures import MEASURES
from holdfast.spark_integration.transport.output import observed_columns
from tests.spark.conftest import Lab
from tests.tiers import cases

pytestmark = pytest.mark.spark

FIRST = [("a", 1), ("b", 2), ("a", 3), (None, 4)]
SECOND = [("a", 10), ("c", 20), (None, 30), ("", 40)]


@pytest.fixture(autouse=True)
def in_progress(lab: Lab) -> None:
    lab.configure({"metrics.inProgress": "true"})


def ended(lab: Lab, frame: DataFrame, query: str = "query") -> StreamingQuery:
    """Run a query over the files that it has not read yet."""
    writer = frame.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    started = writer.option("checkpointLocation", str(lab.folder / query)).start()
    started.awaitTermination()
    return started


def shown(query: StreamingQuery, *names: str) -> list[tuple[Any, ...]]:
    """Return some metrics by micro-batch."""
    return [tuple(row[name] for name in names) for row in holdfast.metrics(query).collect()]


def test_progress_has_what_each_micro_batch_has_done(lab: Lab) -> None:
    lab.feed(FIRST)
    lab.feed(SECOND)
    query = ended(lab, lab.totals())
    [first, _] = [p["observedMetrics"]["holdfast.totals"] for p in query.recentProgress if p["numInputRows"]]
    assert (first["shards"], first["calls"], first["rows"], first["state_rows"]) == (2, 2, 4, 3)
    assert shown(query, "operator", "batchId", "rows", "keys", "keys_new", "keys_removed", "state_rows_put") == [
        ("totals", 0, 4, 3, 3, 0, 3),
        ("totals", 1, 4, 4, 2, 0, 4),
    ]


def counted(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n = sum(map(len, frames)) + (state.getOption or (0,))[0]
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "parts": [[{"at": [n]}]]})


class Counting(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._n = handle.getValueState("n", "n long")
        self._seen = handle.getListState("seen", "v long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        values = [row["v"] for row in rows]
        n = len(values) + (self._n.get() or (0,))[0]
        self._n.update((n,))
        self._seen.appendList([(value,) for value in values])
        yield Row(key=key[0], n=n)


def by_processor(lab: Lab, name: str = "counting") -> DataFrame:
    grouped = holdfast.stream(lab.source()).groupBy("key")
    return grouped.transformWithState(Counting(), "key string, n long", "update", "None", name=name)


@pytest.mark.all
def test_output_that_is_nested_and_never_null_has_metrics_beside_it(lab: Lab) -> None:
    parts = "array<struct<at: array<bigint> not null>>"
    output = T.StructType.fromDDL(f"key string, n long not null, parts {parts} not null")
    lab.feed(FIRST)
    frame = holdfast.stream(lab.source()).groupBy("key")
    query = ended(lab, frame.applyInPandasWithState(counted, output, "n long", "update", "NoTimeout", "counted"))
    assert shown(query, "rows", "keys", "keys_new", "state_rows", "timers_due") == [(4, 3, 3, 3, 0)]


@pytest.mark.all
@pytest.mark.usefixtures("state_store")
def test_rows_of_lists_and_values_are_counted(lab: Lab) -> None:
    lab.feed(FIRST)
    lab.feed(SECOND)
    query = ended(lab, by_processor(lab))
    assert shown(query, "keys", "keys_new", "state_rows_put", "state_rows") == [
        (3, 3 + 4, 3 + 4, 3 + 4),
        (4, 2, 4 + 4, 5 + 4 + 4),
    ]


@pytest.mark.all
@pytest.mark.usefixtures("state_store")
@pytest.mark.parametrize("step", cases(["vectorised", "processor"]))
def test_a_checkpoint_location_goes_on_with_metrics_and_without(lab: Lab, step: str) -> None:
    """One that was begun before there were any is one without."""
    for batch, in_progress in enumerate(["false", "true", "false", "true"]):
        lab.configure({"metrics.inProgress": in_progress})
        lab.feed([("a", batch), (None, batch)])
        query = ended(lab, lab.totals() if step == "vectorised" else by_processor(lab))
        assert any(progress["observedMetrics"] for progress in query.recentProgress) == (in_progress == "true")
        if in_progress == "true":
            assert shown(query, "batchId", "rows", "keys_new")[-1] == (batch, 2, 0)


@pytest.mark.all
def test_without_metrics_in_the_progress_state_servers_are_asked(lab: Lab) -> None:
    """What nobody asked for costs nothing, and yet somebody who asks later sees what this machine remembers."""
    lab.configure({"metrics.inProgress": "false"})
    lab.feed(FIRST)
    ended(lab, lab.totals())
    for executor in lab.local.glob("holdfast-*/executor-*"):
        StateClient(executor).require_server()
    lab.feed(SECOND)
    query = ended(lab, lab.totals())
    assert not query.lastProgress["observedMetrics"]
    of_second = [row for row in holdfast.metrics(query).collect() if row["batchId"] == 1]
    assert [(row["operator"], row["shards"], row["rows"], row["keys"], row["keys_new"]) for row in of_second] == [
        ("totals", 2, 4, 4, 2)
    ]
    assert of_second[0]["call_seconds"] > 0
    assert of_second[0]["calls"] is None
    lab.configure({"metrics.inProgress": "true"})
    lab.feed([("a", 1)])
    both = {row["batchId"]: row["calls"] for row in holdfast.metrics(ended(lab, lab.totals())).collect()}
    assert (both[1], both[2]) == (None, 1)


def test_an_observation_of_the_users_own_is_left_alone(lab: Lab) -> None:
    lab.feed(FIRST)
    query = ended(lab, lab.totals().observe("holdfast.mine", F.count("*").alias("rows")))
    assert query.recentProgress[0]["observedMetrics"]["holdfast.mine"]["rows"] == 3
    assert shown(query, "operator") == [("totals",)]


@pytest.mark.all
@pytest.mark.parametrize("shards", [7, 32_768, 40_000])
def test_however_many_shards_there_are_no_query_fails(lab: Lab, shards: int) -> None:
    """Spark's bitmap has 32,768 bits, and its aggregate fails beyond them."""
    row = F.array(F.col("id"), *[F.lit(1).cast("long")] * (len(MEASURES) - 1))
    observed = lab.spark.range(shards, numPartitions=1).select(row.alias("row")).agg(*observed_columns(F.col("row")))
    [found] = observed.collect()
    assert (found["shards"], found["calls"], found["rows"]) == (shards, shards, shards)


@pytest.mark.all
def test_a_micro_batch_counts_once_however_often_it_is_evaluated(lab: Lab) -> None:
    lab.feed([(str(i), i) for i in range(100)])
    seen = []

    def each(rows: DataFrame, batch_id: int) -> None:
        seen.append((rows.count(), rows.count(), rows.filter("n > 0").count()))

    writer = lab.totals().writeStream.foreachBatch(each).outputMode("update").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(lab.folder / "query")).start()
    query.awaitTermination()
    assert seen == [(100, 100, 100)]
    assert shown(query, "shards", "rows", "keys_new", "state_rows_put") == [(2, 100, 100, 100)]


@pytest.mark.all
@pytest.mark.usefixtures("state_store")
def test_two_operators_of_a_query_have_metrics_of_their_own(lab: Lab) -> None:
    lab.feed(FIRST)
    query = ended(lab, by_processor(lab, "one").union(by_processor(lab, "two")))
    assert shown(query, "operator", "rows") == [("one", 4), ("two", 4)]


def test_what_is_no_query_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"metrics needs a streaming query.*DataFrame"):
        holdfast.metrics(pd.DataFrame())  # type: ignore[arg-type]
