"""What users do in ``foreachBatch``, which evaluates a micro-batch as often as they ask, from wherever they ask."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame

from tests.spark.conftest import Lab
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

Found = dict[str, list[tuple[Any, ...]]]


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def in_thread(action: Callable[[], list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    found: list[list[tuple[Any, ...]]] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    return found[0] if found else []


def use_it(rows: DataFrame) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Evaluate a micro-batch in every way that we know of; each must find the same rows."""
    spark = rows.sparkSession
    yield "collected", rows_of(rows)
    yield "again", rows_of(rows)
    yield "coalesced", rows_of(rows.coalesce(1))
    yield "unions", sorted(set(rows_of(rows.limit(0).union(rows).union(rows))))
    yield "in a thread", in_thread(lambda: rows_of(rows))
    yield "its rdd", sorted(tuple(row) for row in rows.rdd.collect())
    yield "its rdd, in a thread", in_thread(lambda: sorted(tuple(row) for row in rows.rdd.collect()))
    spark.sparkContext.setJobGroup("nightly: a/b.c", "the user's")
    yield "in a job group", rows_of(rows)
    spark.conf.set("spark.sql.shuffle.partitions", "7")
    yield "with other partitions", rows_of(rows)
    cached = rows.persist()
    yield "cached", rows_of(cached)
    yield "cached, in a thread", in_thread(lambda: rows_of(cached))
    cached.unpersist()


def run(lab: Lab, frame: DataFrame, uses: Callable[[DataFrame], Iterator[Any]], query: str = "query") -> list[Found]:
    batches: list[Found] = []
    writer = frame.writeStream.foreachBatch(lambda rows, _: batches.append(dict(uses(rows))))
    writer = writer.outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(lab.folder / query)).start().awaitTermination()
    return batches


def threads_only(rows: DataFrame) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """No task but those of the user's threads: nothing of Spark's tells them which query it is."""
    yield "in a thread", in_thread(lambda: rows_of(rows))
    yield "its rdd, in a thread", in_thread(lambda: sorted(tuple(row) for row in rows.rdd.collect()))


@pytest.mark.filterwarnings("ignore:this query's state is not durable")
@pytest.mark.parametrize("durable", cases([True, False]), ids=lambda it: "durable" if it else "local")
def test_a_micro_batch_may_be_evaluated_in_any_way(lab: Lab, durable: bool) -> None:
    """Each evaluation begins at the same state, and one of them is kept: all of this works with Spark's own."""
    if not durable:
        lab.spark.conf.unset("spark.holdfast.state.dir")
        warnings.filterwarnings("ignore", "this query's state is not durable")
    for _ in range(2):
        lab.feed([("a", 1), ("b", 2)])
    seen = run(lab, lab.totals(), use_it) if durable else []
    expected = [[("a", 1, 1), ("b", 1, 2)], [("a", 2, 2), ("b", 2, 4)]]
    for found, wanted in zip(seen, expected, strict=durable):
        assert found == dict.fromkeys(found, wanted)
    if durable and lab.spark.version.startswith("4.0."):  # where tasks in threads do not know their run
        lab.configure({"shards": str(lab.spark.conf.get("spark.sql.shuffle.partitions"))})
    alone = run(lab, lab.totals(name="alone"), threads_only, "alone")
    for found, wanted in zip(alone, expected, strict=True):
        assert found == dict.fromkeys(found, wanted)
    lab.feed([("a", 1), ("c", 5)])
    later = [("a", 3, 3), ("c", 1, 5)]
    assert run(lab, lab.totals(name="alone"), threads_only, "alone") == [dict.fromkeys(alone[0], later)]
    if durable:
        (again,) = run(lab, lab.totals(), threads_only)
        assert again == dict.fromkeys(again, later)
        for operator, query in (("totals", "query"), ("alone", "alone")):
            assert lab.state(operator, query) == {"a": (3, 3), "b": (2, 4), "c": (1, 5)}


@pytest.mark.all
@pytest.mark.filterwarnings("ignore:this query's state is not durable")
def test_other_partitions_may_be_set_where_nothing_is_durable(lab: Lab) -> None:
    """For a write, say: on Spark 4.0 that hides the number that the query began with, which its shards have too."""
    lab.spark.conf.unset("spark.holdfast.state.dir")
    for _ in range(3):
        lab.feed([("a", 1), ("b", 2)])

    def write(rows: DataFrame) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
        yield "before", rows_of(rows)
        rows.sparkSession.conf.set("spark.sql.shuffle.partitions", "7")
        if batches:  # in the first micro-batch the shards begin
            yield "after", rows_of(rows)

    batches: list[Found] = []
    writer = lab.totals().writeStream.foreachBatch(lambda rows, _: batches.append(dict(write(rows))))
    writer = writer.outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(lab.folder / "query")).start().awaitTermination()
    second, third = ([("a", n, n), ("b", n, 2 * n)] for n in (2, 3))
    assert batches[1:] == [dict.fromkeys(("before", "after"), rows) for rows in (second, third)]


@pytest.mark.filterwarnings("ignore:this query's state is not durable")
@pytest.mark.parametrize("durable", cases([True, False]), ids=str)
def test_one_data_frame_may_be_started_as_two_queries(lab: Lab, durable: bool) -> None:
    """Each has its checkpoint location, so each has its state; both go on, at once and after a restart."""
    if not durable:
        lab.spark.conf.unset("spark.holdfast.state.dir")
    lab.feed([("a", 1), ("b", 2)])
    frame = lab.totals()
    for n in (1, 2):
        started = []
        batches: dict[str, list[Any]] = {"one": [], "two": []}
        for query, found in batches.items():
            writer = frame.writeStream.foreachBatch(lambda rows, _, found=found: found.append(rows_of(rows)))
            writer = writer.outputMode("update").trigger(availableNow=True)
            started.append(writer.option("checkpointLocation", str(lab.folder / query)).start())
        for each in started:
            each.awaitTermination()
        assert batches == {key: [[("a", n, n), ("b", n, 2 * n)]] for key in batches}
        if durable:
            for query in batches:
                assert lab.state(query=query) == {"a": (n, n), "b": (n, 2 * n)}
        lab.feed([("a", 1), ("b", 2)])
        frame = lab.totals()
