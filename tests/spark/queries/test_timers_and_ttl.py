"""Timers, several state tables, state that expires and late rows, of vectorised operators in real queries."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.streaming.state import GroupState

import holdfast
from holdfast import savepoints
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.transport.output import MANY_SHARDS
from tests.spark.conftest import Lab
from tests.tiers import cases, repetitions

pytestmark = pytest.mark.spark


def idle(batch: holdfast.ShardBatch) -> pa.Table:
    """Keep the number of each key's rows in two tables, of which one expires, and give it out when the key is idle."""
    counts, seen = batch.states["counts"], batch.states["seen"]
    n = pc.add(pc.coalesce(counts.get()["n"], 0), batch.groups.count())
    has_rows = pc.greater(batch.groups.count(), 0)
    counts.put(n=n)
    seen.put(n=n, where=has_rows)
    batch.timers.set([batch.processing_ms + 1] * batch.keys.num_rows, where=has_rows)
    counts.delete(where=pc.invert(has_rows))
    return batch.keys.append_column("n", n).filter(pc.invert(has_rows))


@pytest.mark.parametrize("backend", cases(["memory", "filesystem", "rocksdb"]))
def test_spark_calls_shards_for_timers_and_to_evict(lab: Lab, backend: str) -> None:
    """In processing time: without any data, each key comes back once, and what has expired leaves the state."""
    lab.configure({"backend": backend})
    lab.feed([("a", 1), ("b", 1), ("a", 1)])
    lab.feed([("c", 1)])
    frame = (
        holdfast.stream(lab.source())
        .groupBy("key")
        .applyInArrowWithState(
            idle,
            "key string, n long",
            {"counts": "n long", "seen": holdfast.StateTable("n long", ttlDurationMs=2000)},
            "update",
            timeMode="ProcessingTime",
        )
    )
    ended: list[Any] = []
    writer = frame.writeStream.foreachBatch(lambda rows, _: ended.extend(rows.collect())).outputMode("update")
    query = writer.option("checkpointLocation", str(lab.folder / "query")).start()

    def expiring() -> int:
        return len(holdfast.read_state(lab.spark, lab.folder / "query", "idle", table="seen"))

    try:
        end = time.monotonic() + 90
        while len(ended) < 3 or expiring():
            assert time.monotonic() < end, ended
            assert query.exception() is None
            time.sleep(0.1)
    finally:
        query.stop()
    assert sorted(map(tuple, ended)) == [("a", 2), ("b", 1), ("c", 1)]
    saved = savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    assert saved.operators[0].rows == dict.fromkeys(("counts", "seen", "seen.expiring", "timers", "timers_by_due"), 0)


@pytest.mark.parametrize(
    ("states", "time_mode", "text"),
    [
        ("n long", "EventTime", "needs an input with a watermark"),
        ("n long", "eventtime", "timeMode must be one of"),
        ({}, "None", "has no table"),
        ({"timers": "n long"}, "None", "cannot name a state table"),
        ({"a/b": "n long"}, "None", "cannot name a state table"),
        ({"a": "n"}, "None", "not a DDL string"),
        (holdfast.StateTable("n long", ttlDurationMs=0), "None", "ttlDurationMs must be a whole number"),
        (holdfast.StateTable("n long", ttlDurationMs=True), "None", "ttlDurationMs must be a whole number"),
        (holdfast.StateTable("expires_ms long", ttlDurationMs=1), "None", "cannot declare 'expires_ms'"),
    ],
)
def test_a_wrong_definition_says_so(lab: Lab, states: Any, time_mode: Any, text: str) -> None:
    lab.feed([("a", 1)])
    grouped = holdfast.stream(lab.source()).groupBy("key")
    with pytest.raises(InvalidArgumentError, match=text):
        grouped.applyInArrowWithState(idle, "key string, n long", states, "update", timeMode=time_mode)


@pytest.mark.all
@pytest.mark.parametrize(("shards", "python_stages"), [(2, 2), (MANY_SHARDS, 1)])
def test_many_shards_have_one_python_stage_fewer(
    lab: Lab, capsys: pytest.CaptureFixture[str], shards: int, python_stages: int
) -> None:
    """Each shard is a task, and each task would start a stage that unpacks its output."""
    lab.configure({"shards": str(shards)})
    lab.feed([("a", 1)])
    grouped = holdfast.stream(lab.source()).groupBy("key")
    grouped.applyInArrowWithState(idle, "key string, n long", "n long", "update").explain()
    assert capsys.readouterr().out.count("MapInArrow") == python_stages


DELAY_MS = 2_000
Drawn = list[tuple[str, int | None]]


def drawn(chance: random.Random, batches: int = 6) -> list[Drawn]:
    """Return micro-batches of keys and event times in µs: many late, some null, some a µs beside a bound."""
    found, now_ms = [], 10_000
    for _ in range(batches):
        now_ms += chance.choice([1, 500, 1_000, 4_000])
        rows: Drawn = [("clock", now_ms * 1000 + chance.choice([0, 1, 999]))]
        for _ in range(chance.randrange(40)):
            late_ms = chance.choice([0, 500, 1_000, DELAY_MS - 1, DELAY_MS, DELAY_MS + 1, 3_000, 5_000, 9_000])
            at_us = (now_ms - late_ms) * 1000 + chance.choice([-1, 0, 1])
            rows.append((chance.choice("abcdefgh"), None if chance.random() < 0.1 else min(at_us, rows[0][1] or 0)))
        found.append(rows)
    return found


def expected(batches: list[Drawn]) -> tuple[list[Counter[str]], list[int]]:
    """Return the rows of each key that are not late, and how many are, by micro-batch."""
    kept, late, watermarks_ms = [], [], [0, 0]
    for rows in batches:
        on_time = [key for key, at_us in rows if at_us is None or at_us > watermarks_ms[-2] * 1000]
        kept.append(Counter(on_time))
        late.append(len(rows) - len(on_time))
        newest_ms = max(at_us for _, at_us in rows if at_us is not None) // 1000
        watermarks_ms.append(max(watermarks_ms[-1], newest_ms - DELAY_MS))
    return kept, late


def counted(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    yield pd.DataFrame({"key": [key[0]], "n": [sum(map(len, frames))]})


@pytest.mark.slow
@pytest.mark.parametrize("seed", repetitions(1, 20))
@pytest.mark.parametrize("engine", cases(["nested", "flat", "spark"]))
def test_late_rows_of_random_streams(lab: Lab, engine: str, seed: int) -> None:
    """Blobs drop them as Spark's own operator does: the same rows in each micro-batch, and as many counted."""
    batches = drawn(random.Random(seed))
    schema = "key string, at timestamp, v long" if engine == "flat" else "key string, at timestamp, v array<long>"
    value = pa.int64() if engine == "flat" else pa.list_(pa.int64())
    for rows in batches:
        keys, times = zip(*rows, strict=True)
        at = pa.array(times, pa.int64()).cast(pa.timestamp("us", "UTC"))
        lab.feed(pa.table({"key": pa.array(keys), "at": at, "v": pa.nulls(len(rows), value)}))
    lab.configure({"metrics.inProgress": "true"})
    frame = lab.source(schema).withWatermark("at", f"{DELAY_MS} milliseconds")
    arguments = (counted, "key string, n long", "n long", "update", "EventTimeTimeout")
    grouped = frame.groupBy("key") if engine == "spark" else holdfast.stream(frame).groupBy("key")
    output = grouped.applyInPandasWithState(*arguments, **({} if engine == "spark" else {"name": "counted"}))
    found: dict[int, Counter[str]] = {}

    def collect(rows: Any, batch: int) -> None:
        found[batch] = Counter({row["key"]: row["n"] for row in rows.collect()})

    writer = output.writeStream.foreachBatch(collect).outputMode("update").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(lab.folder / "query")).start()
    query.awaitTermination()
    of_batches = {progress["batchId"]: progress for progress in query.recentProgress}
    kept, late = expected(batches)
    assert [found[i] for i in range(len(batches))] == kept
    if engine != "spark":
        counts = [of_batches[i]["observedMetrics"]["holdfast.counted"]["rows_late"] for i in range(len(batches))]
    else:
        counts = [of_batches[i]["stateOperators"][0]["numRowsDroppedByWatermark"] for i in range(len(batches))]
    assert counts == late
