"""The stateful step from end to end: what it computes, in batch and streaming queries, before and after restarts."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

import holdfast
from tests.spark.conftest import OUTPUT, STATE, Lab, count_and_sum
from tests.spark.parity.engines import configured
from tests.tiers import cases

pytestmark = pytest.mark.spark

FIRST = [("a", 1), ("b", 2), ("a", 3), (None, 4)]
SECOND = [("a", 10), ("c", 20), (None, 30), ("", 40)]


def test_state_is_carried_from_micro_batch_to_micro_batch(lab: Lab) -> None:
    lab.feed(FIRST)
    lab.feed(SECOND)
    output = lab.run(lab.totals())
    assert [{row["key"]: (row["n"], row["total"]) for row in rows} for rows in output] == [
        {"a": (2, 4), "b": (1, 2), None: (1, 4)},
        {"a": (3, 14), "c": (1, 20), None: (2, 34), "": (1, 40)},
    ]
    assert lab.state() == {"a": (3, 14), "b": (1, 2), "c": (1, 20), None: (2, 34), "": (1, 40)}


@pytest.mark.all
def test_rows_that_only_fill_batches_are_none_to_a_shard(lab: Lab) -> None:
    """A blob of half a megabyte is followed by hundreds, where a batch may have many rows: it must not be large."""
    long = "a" * 200_000
    with configured(lab.spark, {"spark.sql.execution.arrow.maxRecordsPerBatch": "500000"}):
        lab.feed([(long, 1), ("b", 2), (long, 3), (None, 4)])
        lab.feed([(long, 10), (None, 30)])
        output = lab.run(lab.totals())
    assert [{row["key"]: (row["n"], row["total"]) for row in rows} for rows in output] == [
        {long: (2, 4), "b": (1, 2), None: (1, 4)},
        {long: (3, 14), None: (2, 34)},
    ]


@pytest.mark.parametrize("local_state_survives", cases([False, True]))
def test_a_query_goes_on_after_a_stop(lab: Lab, local_state_survives: bool) -> None:
    lab.feed(FIRST)
    lab.run(lab.totals())
    if not local_state_survives:
        lab.lose_local_state()
    lab.feed(SECOND)
    lab.run(lab.totals())
    assert lab.state() == {"a": (3, 14), "b": (1, 2), "c": (1, 20), None: (2, 34), "": (1, 40)}


def test_a_batch_query_begins_with_empty_state(spark: SparkSession, lab: Lab) -> None:
    frame = spark.createDataFrame(FIRST, "key string, v long")
    totals = holdfast.stream(frame).groupBy("key").applyInArrowWithState(count_and_sum, OUTPUT, STATE, "update")
    expected = frame.groupBy("key").agg(F.count("*").alias("n"), F.sum("v").alias("total"))
    assert sorted(totals.collect(), key=repr) == sorted(expected.collect(), key=repr)


def test_a_function_may_return_nothing(lab: Lab) -> None:
    def silent(batch: holdfast.ShardBatch) -> None:
        count_and_sum(batch)

    lab.feed(FIRST)
    assert lab.run(lab.totals(func=silent)) == [[]]
    assert lab.state() == {"a": (2, 4), "b": (1, 2), None: (1, 4)}


def test_a_micro_batch_that_writes_nothing_keeps_the_state(lab: Lab) -> None:
    def only_large(batch: holdfast.ShardBatch) -> pa.Table | None:
        return count_and_sum(batch) if pc.max(batch.rows["v"]).as_py() < 30 else None

    lab.configure({"shards": "1"})
    lab.feed(FIRST)
    lab.feed([("a", 100)])
    lab.feed([("a", 5)])
    lab.run(lab.totals(func=only_large))
    assert lab.state() == {"a": (3, 9), "b": (1, 2), None: (1, 4)}


def test_two_operators_of_one_query_keep_apart(spark: SparkSession, lab: Lab) -> None:
    with configured(spark, {"spark.sql.streaming.unsupportedOperationCheck": "false"}):
        lab.feed(FIRST)
        lab.feed(SECOND)
        doubled = lab.source().withColumn("v", F.col("v") * 2)
        other = (
            holdfast.stream(doubled)
            .groupBy("key")
            .applyInArrowWithState(count_and_sum, OUTPUT, STATE, "update", name="doubled")
        )
        lab.run(lab.totals().union(other))

    assert lab.state("totals") == {"a": (3, 14), "b": (1, 2), "c": (1, 20), None: (2, 34), "": (1, 40)}
    assert lab.state("doubled") == {"a": (3, 28), "b": (1, 4), "c": (1, 40), None: (2, 68), "": (1, 80)}


def test_more_shards_than_partitions(lab: Lab) -> None:
    lab.configure({"shards": "5", "commit.carriedBytes": "0"})
    lab.feed([(str(i), i) for i in range(100)])
    lab.feed([(str(i), i) for i in range(50, 150)])
    lab.run(lab.totals())
    expected: dict[Any, Any] = {str(i): (1, i) for i in range(150)} | {str(i): (2, 2 * i) for i in range(50, 100)}
    assert lab.state() == expected
    assert len({path.parent.parent for path in lab.commits()}) == 5


@pytest.mark.all
def test_state_columns_may_have_the_names_of_key_columns(lab: Lab) -> None:
    def latest(batch: holdfast.ShardBatch) -> None:
        batch.state.put(key=batch.groups.last("v"))

    lab.feed(FIRST)
    lab.run(lab.totals(func=latest, stateStructType="key long"))
    state = holdfast.read_state(lab.spark, lab.folder / "query", "totals")
    assert state.column_names == ["key", "value.key"]
    assert set(state["key"].to_pylist()) == {"a", "b", None}


@pytest.mark.smoke
def test_the_watermark_reaches_the_function_and_nobody_behind_it(lab: Lab) -> None:
    """Spark's operator hands none on, so that a mark on the output would promise what never comes."""

    def newest(batch: holdfast.ShardBatch) -> pa.Table:
        ts = batch.groups.max("ts")
        batch.state.put(ts=ts)
        seen = pa.array([batch.watermark_ms] * len(ts), pa.int64())
        return batch.keys.append_column("ts", ts).append_column("watermark_ms", seen)

    def at(*seconds: int) -> pa.Table:
        stamps = pa.array([s * 1_000_000 for s in seconds], pa.timestamp("us", "UTC"))
        return pa.table({"key": pa.array(["a"] * len(seconds)), "ts": stamps})

    for seconds in [(1000, 1005), (2000, 1990), (3000,)]:
        lab.feed(at(*seconds))
    events = lab.source("key string, ts timestamp").withWatermark("ts", "10 seconds")
    newest_times = (
        holdfast.stream(events)
        .groupBy("key")
        .applyInArrowWithState(
            newest, "key string, ts timestamp, watermark_ms long", "ts timestamp", "update", name="totals"
        )
    )
    assert events.schema["ts"].metadata
    assert newest_times.schema["ts"].metadata == {}
    output = lab.run(newest_times)
    seen = [rows[0]["watermark_ms"] for rows in output if rows]
    assert seen == [0, 995_000, 1_990_000]
    assert [rows[0]["ts"].timestamp() for rows in output if rows] == [1005, 2000, 3000]


@pytest.mark.all
def test_a_batch_query_inside_of_a_streaming_one_has_no_state_either(lab: Lab) -> None:
    seen: list[Any] = []

    def inner(rows: DataFrame, _: int) -> None:
        totals = holdfast.stream(rows).groupBy("key").applyInArrowWithState(count_and_sum, OUTPUT, STATE, "update")
        seen.append({row["key"]: row["n"] for row in totals.collect()})

    lab.configure({"commit.carriedBytes": "0"})
    lab.feed(FIRST)
    lab.feed(SECOND)
    writer = lab.source().writeStream.foreachBatch(inner).trigger(availableNow=True)
    writer.option("checkpointLocation", str(lab.folder / "query")).start().awaitTermination()
    assert seen == [{"a": 2, "b": 1, None: 1}, {"a": 1, "c": 1, None: 1, "": 1}]
    assert not lab.commits()
