"""What rows may hold on their way through Spark, packed or not, and types that are the same on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StructType

import holdfast
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.plan.definition import Definition, KeyedRows
from holdfast.spark_integration.spark_types import arrow_schema, parse_struct
from holdfast.spark_integration.transport.output import MANY_SHARDS
from holdfast.spark_integration.transport.packed import HASH, Gather, PackedTransport, Received, quoted
from holdfast.spark_integration.transport.routes import ROUTE, route_column, routes_of, shards_of
from holdfast.testing.ddl import parse_schema
from tests.spark.conftest import Lab
from tests.tiers import cases
from tests.unit.spark_integration.test_spark_types import COLLATED, ORDINARY, field

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("text", ["n lonk", "n long total double", ""])
def test_ddl_that_cannot_be_read_says_whose_it_is(spark: SparkSession, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="stateStructType"):
        parse_struct(text, "stateStructType")
    assert parse_struct("n long, total double", "it").names == ["n", "total"]


def test_ddl_means_the_same_to_spark(spark: Any) -> None:
    for ddl in ("a int, b string not null", "a: decimal(5,2), b map<string,array<struct<x:int,y:timestamp_ntz>>>"):
        assert parse_schema(ddl) == StructType.fromDDL(ddl)


EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2**32 - 1, 2**64 - 2**32, 2**64 - 1]


def test_spark_computes_the_same_and_places_shards_where_we_say(spark: SparkSession) -> None:
    """Else rows of one key would meet two shards, or two busy shards one partition."""
    from pyspark.sql import functions as F  # noqa: N812

    from holdfast.spark_integration.transport.routes import route_column, shard_column

    random = np.random.default_rng(7).integers(0, 2**64, 200, np.uint64, endpoint=False)
    hashes = np.concatenate([np.array(EXTREMES, np.uint64), random])
    frame = spark.createDataFrame([(int(h),) for h in hashes.view(np.int64)], "h long").coalesce(1)
    for shards, partitions in ((1, 3), (2, 2), (7, 3), (8, 4)):
        routes = routes_of(shards)
        routed = frame.select(
            "h", shard_column(F.col("h"), shards).alias("shard"), route_column(F.col("h"), shards).alias("route")
        )
        rows = routed.repartition(partitions, "route").withColumn("partition", F.spark_partition_id()).collect()
        assert len(rows) == len(hashes)
        wanted = dict(zip(hashes.view(np.int64).tolist(), shards_of(hashes, shards).tolist(), strict=True))
        for row in rows:
            assert row.shard == wanted[row.h]
            assert row.route == routes[row.shard]
            assert row.partition == row.shard % partitions


RAW = [b"\xff\xfe", b"caf\xe9", "café".encode(), b"", None]


def keep_text(batch: holdfast.ShardBatch) -> pa.Table:
    """Count each key, and keep its text as a value, too."""
    n = pc.add(pc.coalesce(batch.state.get()["n"], 0), batch.groups.count())
    batch.state.put(n=n, seen=batch.keys["name"])
    seen = batch.state.get()["seen"]
    return pa.table({"name": batch.keys["name"], "seen": seen, "n": n})


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "shards"), cases([("memory", MANY_SHARDS), ("rocksdb", 2)]))
def test_text_that_is_not_utf8_survives_the_loss_of_the_executor(lab: Lab, backend: str, shards: int) -> None:
    """In keys, values and output; the second run finds nothing locally."""
    lab.configure({"backend": backend, "commit.carriedBytes": "0", "shards": str(shards)})

    def run() -> list[Any]:
        lab.feed(pa.table({"raw": pa.array(RAW, pa.binary())}))
        source = lab.source("raw binary").select(F.expr("cast(raw as string)").alias("name"))
        kept = (
            holdfast.stream(source)
            .groupBy("name")
            .applyInArrowWithState(
                keep_text, "name string, seen string, n long", "n long, seen string", "update", name="texts"
            )
            .selectExpr("cast(name as binary)", "cast(seen as binary)", "n")
        )
        (rows,) = lab.run(kept)
        return sorted((tuple(row.values()) for row in rows), key=repr)

    assert run() == sorted(((raw, raw, 1) for raw in RAW), key=repr)
    lab.lose_local_state()
    assert run() == sorted(((raw, raw, 2) for raw in RAW), key=repr)
    state = holdfast.read_state(lab.spark, lab.folder / "query", "texts")
    names = state["name"].combine_chunks().cast(pa.large_binary()).to_pylist()
    assert sorted(names, key=repr) == sorted(RAW, key=repr)
    assert set(state["n"].to_pylist()) == {2}


def test_spark_exchanges_these_very_arrow_types_with_python(spark: SparkSession) -> None:
    """The table of types is our own: it must say what Spark really sends, nested names and nullability included."""
    more = [T.MapType(T.StringType(), T.LongType()), T.MapType(T.IntegerType(), T.ArrayType(COLLATED), False), COLLATED]
    schema = T.StructType([field(t, f"c{i}") for i, t in enumerate([*ORDINARY, *more])])
    frame = spark.createDataFrame([], schema).union(spark.range(1).selectExpr(*["null"] * len(schema)))

    def tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"schema": pa.array([batch.schema.serialize().to_pybytes()])})

    told = [pa.ipc.read_schema(pa.py_buffer(row.schema)) for row in frame.mapInArrow(tell, "schema binary").collect()]
    expected = arrow_schema(schema, "the input")
    assert told
    assert dict(zip(told[0].names, told[0].types, strict=True)) == dict(
        zip(expected.names, expected.types, strict=True)
    )
    nested = [(a.type, b.type) for a, b in zip(told[0], expected, strict=True) if a.type.num_fields]
    assert [a.field(0).nullable for a, _ in nested] == [b.field(0).nullable for _, b in nested]


BEFORE = [("a", 100), ("a", 105), ("b", 109), ("c", 100)]
AFTER = [("d", 130), ("a", 102), ("a", 119), ("c", 108)]


@dataclass(frozen=True)
class RowsOneByOne:
    """What sent a key and an event time until November 2026."""

    packed: PackedTransport

    @property
    def arrow_schema(self) -> pa.Schema:
        return self.packed.arrow_schema

    def send(self, frame: DataFrame, hashed: Column, _: object) -> DataFrame:
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


@pytest.mark.slow
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
