"""Processors in real queries: their state is durable, and is what `read_state` shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import holdfast
from holdfast import savepoints
from holdfast.errors import InvalidArgumentError
from tests.spark.conftest import Lab
from tests.spark.parity.engines import configured
from tests.spark.processors.engines import NEEDED
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("state_store")]

OUTPUT = "key string, n long, seen string"
_DEFAULT_STORE = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"


class Keeping(StatefulProcessor):
    """Keeps each key's rows in a value, a list and a map, and gives out a key when its last timer is due."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long")
        self.values = handle.getListState("values", "v long")
        self.times = handle.getMapState("times", "v long", "n int")

    def add(self, values: list[int]) -> tuple[int, str]:
        self.count.update(((self.count.get() or (0,))[0] + len(values),))
        for v in values:
            self.values.appendValue((v,))
            before = self.times.getValue((v,))
            self.times.updateValue((v,), (1 if before is None else before.n + 1,))
        self.handle.registerTimer(1000 * max(values) + 5000)
        return self.count.get()[0], self.seen()

    def seen(self) -> str:
        return f"{[v for (v,) in self.values.get()]} {sorted((v, n) for (v,), (n,) in self.times.iterator())}"

    def expire(self) -> tuple[int, str]:
        ended = -self.count.get()[0], self.seen()
        self.count.clear()
        self.values.clear()
        self.times.clear()
        return ended


class KeepingByRow(Keeping):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, seen = self.add([row.v for row in rows])
        yield Row(seen=seen, n=n, key=key[0])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        if len(list(self.handle.listTimers())) == 1:
            n, seen = self.expire()
            yield Row(key=key.key, n=n, seen=seen)


class KeepingByFrame(Keeping):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[pd.DataFrame]:
        n, seen = self.add([int(v) for frame in rows for v in frame["v"]])
        yield pd.DataFrame({"seen": [seen], "n": [n], "key": [key[0]]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        if len(list(self.handle.listTimers())) == 1:
            n, seen = self.expire()
            yield pd.DataFrame({"key": [key.key], "n": [n], "seen": [seen]})


def kept(lab: Lab, *, in_pandas: bool) -> Any:
    events = lab.source().selectExpr("*", "timestamp_seconds(v) as at").withWatermark("at", "0 seconds")
    grouped = holdfast.stream(events).groupBy("key")
    if in_pandas:
        return grouped.transformWithStateInPandas(KeepingByFrame(), OUTPUT, "Update", "EventTime", name="kept")
    return grouped.transformWithState(KeepingByRow(), OUTPUT, "Update", "EventTime", name="kept")


WAYS = [(backend, in_pandas) for backend in ("memory", "filesystem", "rocksdb") for in_pandas in (False, True)]


@pytest.mark.smoke
@pytest.mark.parametrize(("backend", "in_pandas"), cases(WAYS))
def test_state_and_timers_survive_the_loss_of_the_executor(lab: Lab, backend: str, in_pandas: bool) -> None:
    """Value, list, map and timers are restored from durable storage, by Row and by frame."""
    lab.configure({"backend": backend})
    lab.feed([("a", 1), ("b", 2)])
    lab.feed([("a", 2), ("a", 1)])
    first = lab.run(kept(lab, in_pandas=in_pandas))
    assert [row for rows in first for row in rows if row["key"] == "a"] == [
        {"key": "a", "n": 1, "seen": "[1] [(1, 1)]"},
        {"key": "a", "n": 3, "seen": "[1, 2, 1] [(1, 2), (2, 1)]"},
    ]
    lab.lose_local_state()
    lab.feed([("a", 3), ("c", 100)])
    then = [row for rows in lab.run(kept(lab, in_pandas=in_pandas)) for row in rows]
    assert sorted(map(tuple, (row.values() for row in then)), key=str) == [
        ("a", -4, "[1, 2, 1, 3] [(1, 2), (2, 1), (3, 1)]"),
        ("a", 4, "[1, 2, 1, 3] [(1, 2), (2, 1), (3, 1)]"),
        ("b", -1, "[2] [(2, 1)]"),
        ("c", 1, "[100] [(100, 1)]"),
    ]
    shown = {
        table: holdfast.read_state(lab.spark, lab.folder / "query", "kept", table=table).to_pylist()
        for table in ("count", "values", "times", "timers")
    }
    assert shown["count"] == [{"key": "c", "n": 1}]
    assert [(row["key"], row["v"]) for row in shown["values"]] == [("c", 100)]
    assert shown["times"] == [{"key": "c", "entry.v": 100, "n": 1}]
    assert shown["timers"] == [{"key": "c", "due_ms": 105_000}]
    saved = savepoints.create(lab.spark, lab.folder / "query", lab.folder / "savepoints", "one")
    assert saved.operators[0].rows["timers_by_due"] == 1


def test_wrong_arguments_are_refused_at_definition(lab: Lab) -> None:
    """In Spark some of them fail in the first micro-batch, or never."""
    lab.feed([("a", 1)])
    grouped = holdfast.stream(lab.source()).groupBy("key")
    by_time = {"eventTimeColumnName": "at"}
    wrong = [
        ((KeepingByRow(), OUTPUT, "update", "EventTime"), {}, InvalidArgumentError, "needs an input with a watermark"),
        ((KeepingByRow(), OUTPUT, "update", "Later"), {}, IllegalArgumentException, "UNKNOWN_TIME_MODE"),
        ((KeepingByRow(), OUTPUT, "some", "None"), {}, IllegalArgumentException, "STREAMING_OUTPUT_MODE.INVALID"),
        ((KeepingByRow, OUTPUT, "update", "None"), {}, InvalidArgumentError, "given='the class KeepingByRow'"),
        ((KeepingByRow(), OUTPUT, "update", "None"), {"name": "a/b"}, InvalidArgumentError, "cannot name an operator"),
        ((KeepingByRow(), OUTPUT, "update", "None"), {"eventTimeColumnName": "n"}, InvalidArgumentError, "a timestamp"),
        ((KeepingByRow(), OUTPUT, "update", "None"), by_time, AnalysisException, "WITHOUT_WATERMARK"),
        (
            (KeepingByRow(), f"{OUTPUT}, at timestamp", "update", "ProcessingTime"),
            by_time,
            InvalidArgumentError,
            "EventT",
        ),
        (
            (KeepingByRow(), f"{OUTPUT}, at timestamp", "update", "None"),
            by_time,
            AnalysisException,
            "WITHOUT_WATERMARK",
        ),
        ((KeepingByRow(), OUTPUT, "update", "None"), {"initialState": grouped}, InvalidArgumentError, "grouped DataFr"),
    ]
    for arguments, more, error, text in wrong:
        for method in (grouped.transformWithState, grouped.transformWithStateInPandas):
            with pytest.raises(error, match=text):
                method(*arguments, **more)


def test_sparks_default_state_store_is_refused_at_definition(lab: Lab) -> None:
    """A10: Spark refuses it in the first micro-batch; a batch query does without."""
    lab.feed([("a", 1)])
    batch = lab.spark.createDataFrame([("a", 1)], "key string, v long")
    arguments = KeepingByRow(), OUTPUT, "update", "None"
    with configured(lab.spark, {next(iter(NEEDED)): _DEFAULT_STORE}):
        with pytest.raises(InvalidArgumentError, match=r"needs Spark's RocksDB state store: set spark\.sql"):
            holdfast.stream(lab.source()).groupBy("key").transformWithState(*arguments)
        assert holdfast.stream(batch).groupBy("key").transformWithState(*arguments).columns == ["key", "n", "seen"]
