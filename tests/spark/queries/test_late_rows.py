"""Late rows are dropped one by one and counted, whatever columns the rows have."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pytest

import holdfast
from tests.spark.conftest import Lab
from tests.tiers import cases, repetitions

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

pytestmark = [pytest.mark.spark, pytest.mark.slow]

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


@pytest.mark.parametrize("seed", repetitions(2, 20))
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
