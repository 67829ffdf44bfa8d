"""What a restart may change of timers, times to live and state tables, and what becomes of those that are stored."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupState

import holdfast
from tests.spark.conftest import Lab
from tests.tiers import cases

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow(20),
    pytest.mark.filterwarnings("ignore:this definition of .* cannot continue the state"),
]

OUT = "key string, due_ms long, n long"
LAST = 2**63 - 1


def feed(lab: Lab, *rows: tuple[str, int]) -> None:
    """Add a micro-batch of keys, each at a second."""
    times = [dt.datetime.fromtimestamp(second, dt.UTC) for _, second in rows]
    at = pa.array(times, pa.timestamp("us", "UTC"))
    lab.feed(pa.table({"key": pa.array([key for key, _ in rows]), "at": at}))


def keep(timers: Mapping[str, int], seen: list[int] | None = None) -> Callable[[holdfast.ShardBatch], pa.Table]:
    """Return a function that counts in the first table, sets these timers, and gives out what is due."""

    def count(batch: holdfast.ShardBatch) -> pa.Table:
        state = next(iter(batch.states.values()))
        has_rows = pc.greater(batch.groups.count(), 0)
        state.put(n=pc.add(pc.coalesce(state.get()["n"], 0), batch.groups.count()))
        if timers:
            keys = batch.keys["key"].to_pylist()
            batch.timers.set(pa.array([timers.get(key) for key in keys], pa.int64()), where=has_rows)
            due_ms = batch.timers.due_ms
        else:
            due_ms = pa.nulls(batch.keys.num_rows, pa.int64())
        return batch.keys.append_column("due_ms", due_ms).append_column("n", state.get()["n"])

    return count


def query(lab: Lab, function: Any, states: Any = "n long", mode: str = "EventTime") -> DataFrame:
    source = lab.source("key string, at timestamp").withWatermark("at", "0 seconds")
    grouped = holdfast.stream(source).groupBy("key")
    return grouped.applyInArrowWithState(function, OUT, states, "update", name="totals", timeMode=mode)  # type: ignore[arg-type]


def due(batches: list[list[dict[str, Any]]]) -> dict[str, int]:
    return {row["key"]: row["due_ms"] for batch in batches for row in batch if row["due_ms"] is not None}


@pytest.mark.parametrize("backend", cases(["memory", "filesystem", "rocksdb"]))
def test_timers_outlive_a_restart_without_local_files(lab: Lab, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 0, at the watermark itself, and at the end of time; restored from a snapshot, or from commits."""
    lab.configure({"backend": backend, "snapshot.maxCommits": "2"})
    function = keep({"zero": 0, "at": 20_000, "next": 20_001, "last": LAST})
    feed(lab, ("zero", 10), ("at", 10), ("next", 10), ("last", 10))
    found = [lab.run(query(lab, function))]
    for second in (20, 21, 22):
        lab.lose_local_state()
        feed(lab, ("other", second))
        found.append(lab.run(query(lab, function)))
    assert [due(batches) for batches in found] == [{"zero": 0}, {}, {"at": 20_000, "next": 20_001}, {}]
    timers = holdfast.read_state(lab.spark, lab.folder / "query", "totals", table="timers")
    assert {row["key"]: row["due_ms"] for row in timers.to_pylist()} == {"last": LAST}


@pytest.mark.all
def test_the_other_clock_is_refused(lab: Lab) -> None:
    """Timers in event time would all be due at once in processing time, and those in processing time never."""
    feed(lab, ("a", 10))
    lab.run(query(lab, keep({"a": 90_000})))
    feed(lab, ("a", 11))
    # Without a clock, Spark's own state has a column less, and Spark is the first to refuse.
    for mode, why in (("ProcessingTime", "timers of another clock"), ("None", "SCHEMA_NOT_COMPATIBLE")):
        with pytest.raises(StreamingQueryException, match=why):
            lab.run(query(lab, keep({"a": 90_000} if mode != "None" else {}), mode=mode))
    lab.run(query(lab, keep({"a": 90_000})))
    assert lab.state() == {"a": (2,)}


@pytest.mark.all
@pytest.mark.parametrize("states", [{"b": "n long"}, "n long"], ids=["renamed", "without a name"])
def test_tables_are_not_renamed(lab: Lab, states: Any) -> None:
    """Or the new one would begin empty; what is stored stays, and the old definition goes on with it."""
    feed(lab, ("a", 10))
    lab.run(query(lab, keep({}), {"a": "n long"}, "None"))
    feed(lab, ("a", 11))
    with pytest.raises(StreamingQueryException, match=r"state tables cannot be renamed.*left_out=\['a'\]"):
        lab.run(query(lab, keep({}), states, "None"))
    lab.run(query(lab, keep({}), {"a": "n long"}, "None"))
    stored = holdfast.read_state(lab.spark, lab.folder / "query", "totals", table="a")
    assert stored.to_pylist() == [{"key": "a", "n": 2}]


@pytest.mark.all
def test_tables_come_and_go(lab: Lab) -> None:
    """One that is left out waits for the run that declares it again."""
    for states in ({"a": "n long"}, {"a": "n long", "b": "n long"}, {"b": "n long"}, {"b": "n long", "a": "n long"}):
        feed(lab, ("a", 10))
        lab.run(query(lab, keep({}), states, "None"))
    found = [holdfast.read_state(lab.spark, lab.folder / "query", "totals", table=table).to_pylist() for table in "ab"]
    assert found == [[{"key": "a", "n": 2}], [{"key": "a", "n": 2}]]


def last_value(key: Any, chunks: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Keep the last value, which may be None."""
    for chunk in chunks:
        value = chunk["v"].iloc[-1]
        state.update((None if pd.isna(value) else int(value),))
    yield pd.DataFrame({"key": [key[0]], "n": pd.array([state.get[0]], "Int64")})


@pytest.mark.all
def test_a_state_column_may_not_become_not_null(lab: Lab) -> None:
    """Rows may be stored that have null there; the run is refused before it claims, and the old definition goes on."""

    def by_key(state: str) -> DataFrame:
        grouped = holdfast.stream(lab.source()).groupBy("key")
        return grouped.applyInPandasWithState(
            last_value, "key string, n long", state, "update", "NoTimeout", name="totals"
        )

    def stored() -> set[Path]:
        return {path for path in (lab.folder / "durable" / "totals").rglob("*") if path.is_file()}

    lab.feed([("a", None)])  # type: ignore[list-item]
    lab.run(by_key("n long"))
    lab.feed([("a", None)])  # type: ignore[list-item]
    before = stored()
    with pytest.raises(StreamingQueryException, match=r"n: it is NOT NULL"):
        lab.run(by_key("n long NOT NULL"))
    assert stored() == before
    assert lab.run(by_key("n long")) == [[{"key": "a", "n": None}]]


@pytest.mark.all
def test_another_time_to_live_is_taken(lab: Lab) -> None:
    """It holds for what is written from then on: what was written without one lives until it is written again."""
    for ttl_ms in (None, 3_600_000, 1, 86_400_000, None):
        feed(lab, ("a", 10))
        table = holdfast.StateTable("n long", ttlDurationMs=ttl_ms)
        lab.run(query(lab, keep({}), {"a": table}, "None"))
    stored = holdfast.read_state(lab.spark, lab.folder / "query", "totals", table="a").to_pylist()
    assert stored == [{"key": "a", "n": 2}], "what had a millisecond had expired"
