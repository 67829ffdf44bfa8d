"""A query whose rows once travelled one by one, with a route that Spark computed, goes on with packed rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import holdfast
from holdfast.spark_integration.plan.definition import Definition, KeyedRows
from holdfast.spark_integration.transport.packed import PackedTransport
from holdfast.spark_integration.transport.routes import ROUTE, route_column
from holdfast.spark_integration.transport.transport import HASH, Gather, Received, quoted
from tests.spark.conftest import Lab
from tests.tiers import cases

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.state import GroupState

pytestmark = [pytest.mark.spark, pytest.mark.slow]

BEFORE = [("a", 100), ("a", 105), ("b", 109), ("c", 100)]
AFTER = [("d", 130), ("a", 102), ("a", 119), ("c", 108)]


@dataclass(frozen=True)
class RowsOneByOne:
    """What sent a key and an event time until November 2026."""

    packed: PackedTransport

    @property
    def arrow_schema(self) -> pa.Schema:
        return self.packed.arrow_schema

    def send(self, frame: DataFrame, hashed: Column) -> DataFrame:
        event_time = self.packed.event_time
        assert event_time is not None
        at, field = F.unix_micros(quoted(event_time.column)), event_time.sent
        moment = at.alias(field.name, metadata=field.metadata)
        sent = frame.select("key", at.alias("ts"), moment, hashed.alias(HASH))
        return sent.select("*", route_column(F.col(HASH), self.packed.shards).alias(ROUTE))

    def receive(self, chunks: Iterable[pd.DataFrame], gather: Gather) -> Received:
        return Received(gather(map(self._table, chunks)), 0)

    def _table(self, chunk: pd.DataFrame) -> pa.Table:
        columns = [pa.array(chunk[name]) for name in self.arrow_schema.names]
        numbered = zip(columns, self.arrow_schema.types, strict=True)
        return pa.table([c.view(t) if c.type == pa.int64() else c for c, t in numbered], schema=self.arrow_schema)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    packed = Definition._transport

    def transport(self: Definition, rows: KeyedRows, shards: int) -> RowsOneByOne:
        return RowsOneByOne(packed(self, rows, shards))

    with monkeypatch.context() as patch:
        patch.setattr(Definition, "_transport", transport)
        yield patch


def count(key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n = sum(map(len, frames)) + (state.getOption or (0,))[0]
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


class Counting(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        n = sum(map(len, rows)) + (self._n.get() or (0,))[0]
        self._n.update((n,))
        yield pd.DataFrame({"key": [key[0]], "n": [n]})


def at(rows: list[tuple[str, int]]) -> pa.Table:
    keys, seconds = zip(*rows, strict=True)
    return pa.table({"key": keys, "ts": pa.array([s * 1_000_000 for s in seconds], pa.timestamp("us", "UTC"))})


@pytest.mark.usefixtures("state_store")
@pytest.mark.parametrize("host", cases(["processor", "function"]))
def test_a_restart_goes_on_with_blobs(lab: Lab, host: str, one_by_one: pytest.MonkeyPatch) -> None:
    """Spark pins the key of its state, the route, and the columns of the pointer: neither tells how rows came."""

    def output() -> DataFrame:
        events = lab.source("key string, ts timestamp").withWatermark("ts", "0 seconds")
        grouped = holdfast.stream(events).groupBy("key")
        if host == "processor":
            arguments = (Counting(), "key string, n long", "append", "EventTime")
            return grouped.transformWithStateInPandas(*arguments, name="counted")
        return grouped.applyInPandasWithState(
            count, "key string, n long", "n long", "append", "EventTimeTimeout", name="counted"
        )

    lab.feed(at(BEFORE))
    lab.run(output(), mode="append")
    one_by_one.undo()
    lab.lose_local_state()
    lab.feed(at(AFTER))
    lab.feed(at([("d", 131)]))
    shown = lab.run(output(), mode="append")
    # Spark filters by the watermark of the micro-batch before, which the first of a restart has, too.
    last: dict[str, int] = {row["key"]: row["n"] for row in [row for rows in shown for row in rows]}
    assert last == {"d": 2, "a": 3}
