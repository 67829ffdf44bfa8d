"""Timers, several state tables and state that expires, of vectorised operators in real queries."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import holdfast
from holdfast import savepoints
from holdfast.errors import InvalidArgumentError
from tests.spark.conftest import Lab
from tests.tiers import cases

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
        ({}, "None", "names no table"),
        ({"timers": "n long"}, "None", "cannot name a state table"),
        ({"a/b": "n long"}, "None", "cannot name a state table"),
        ({"a": "n"}, "None", "not a DDL string"),
        (holdfast.StateTable("n long", ttlDurationMs=0), "None", "ttlDurationMs must be a whole number"),
        (holdfast.StateTable("n long", ttlDurationMs=True), "None", "ttlDurationMs must be a whole number"),
        (holdfast.StateTable("expires_ms long", ttlDurationMs=1), "None", "a column 'expires_ms' of holdfast's own"),
    ],
)
def test_a_wrong_definition_says_so(lab: Lab, states: Any, time_mode: Any, text: str) -> None:
    """Nothing has run then."""
    lab.feed([("a", 1)])
    grouped = holdfast.stream(lab.source()).groupBy("key")
    with pytest.raises(InvalidArgumentError, match=text):
        grouped.applyInArrowWithState(idle, "key string, n long", states, "update", timeMode=time_mode)


@pytest.mark.all
@pytest.mark.parametrize(("time_mode", "python_stages"), [("None", 2), ("EventTime", 1)])
def test_rows_of_many_event_times_are_not_packed(
    lab: Lab, capsys: pytest.CaptureFixture[str], time_mode: Any, python_stages: int
) -> None:
    """Blobs would come with a mark for each event time, which costs as much as a row, and with one more stage."""
    lab.feed([("a", 1)])
    source = lab.source().selectExpr("key", "timestamp_millis(v) as at").withWatermark("at", "0 seconds")
    grouped = holdfast.stream(source).groupBy("key")
    grouped.applyInArrowWithState(idle, "key string, n long", "n long", "update", timeMode=time_mode).explain()
    assert capsys.readouterr().out.count("MapInArrow") == python_stages


@pytest.mark.all
def test_timers_and_ttl_over_a_batch_data_frame(lab: Lab) -> None:
    """The state is empty, and no timer fires."""
    frame = lab.spark.createDataFrame([("a", 1), ("b", 1), ("a", 1)], "key string, v long")

    def count(batch: holdfast.ShardBatch) -> pa.Table:
        assert pc.sum(batch.state.exists()).as_py() in (0, None)
        batch.state.put(n=batch.groups.count())
        batch.timers.set([0] * batch.keys.num_rows)
        return batch.keys.append_column("n", batch.state.get()["n"])

    state = holdfast.StateTable("n long", ttlDurationMs=1)
    stream = holdfast.stream(frame).groupBy("key")
    found = stream.applyInArrowWithState(count, "key string, n long", state, "update", timeMode="EventTime")
    assert sorted(map(tuple, found.collect())) == [("a", 2), ("b", 1)]
