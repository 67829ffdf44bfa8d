"""A query over Spark Connect, in a process of its own: a server and a classic session cannot share one.

Started as a program with a folder that holds ``input``, and one of `PARTS`; prints what it found.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.errors import StreamingQueryException
from pyspark.errors.exceptions.connect import SparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming import StatefulProcessor

import holdfast
from holdfast import savepoints, sinks
from holdfast.errors import InvalidArgumentError
from holdfast.examples.sinks import csv_folder
from holdfast.examples.stateful import sessions
from tests.input_files import add_file
from tests.spark.application import settings_of
from tests.spark.processors.engines import NEEDED

if TYPE_CHECKING:
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery
    from pyspark.sql.streaming.state import GroupState

RESULT = "key string, n long"
_STARTS = 6


def add_up(batch: holdfast.ShardBatch) -> pa.Table:
    n = pc.add(pc.coalesce(batch.state.get()["n"], 0), batch.groups.count())
    batch.state.put(n=n)
    return batch.keys.append_column("n", n)


def add_up_by_key(key: tuple[Any, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    (n,) = state.getOption or (0,)
    n += sum(len(chunk) for chunk in chunks)
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def read(spark: SparkSession, folder: Path) -> DataFrame:
    """Return a stream of the input, a file a micro-batch."""
    source = spark.readStream.schema("key string, v long").option("maxFilesPerTrigger", 1)
    return source.parquet(str(folder / "input"))


def read_on(folder: Path) -> None:
    """Let queries read what they have not been given yet."""
    for path in (folder / "more").iterdir():
        path.rename(folder / "input" / path.name)


def counted(rows: DataFrame, name: str = "counts") -> DataFrame:
    return holdfast.stream(rows).groupBy("key").applyInArrowWithState(add_up, RESULT, "n long", "update", name=name)


def processed(rows: DataFrame, **options: Any) -> DataFrame:
    return holdfast.stream(rows).groupBy("key").transformWithState(CountRows(), RESULT, "update", "None", **options)


def run(frame: DataFrame, location: Path) -> StreamingQuery:
    """Run a query over what it has not read yet."""
    writer = frame.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(location)).start()
    query.awaitTermination()
    return query


def state_of(spark: SparkSession, location: Path, name: str, **table: str) -> list[dict[str, Any]]:
    return sorted(holdfast.read_state(spark, location, name, **table).to_pylist(), key=repr)


def evaluate(folder: Path, name: str) -> Callable[[DataFrame, int], None]:
    """Return a function for ``foreachBatch`` that evaluates a micro-batch in several ways and writes what it finds.

    It runs in a process of the server, on whose threads nothing tells which query they work for. The query named "one"
    goes all the ways; the other one, meanwhile, those of which Spark tells most and least.
    """

    def each(rows: DataFrame, batch_id: int) -> None:
        def found(frame: DataFrame) -> list[list[Any]]:
            return sorted(([row["key"], row["n"]] for row in frame.collect()), key=repr)

        ways = [found(rows)]
        thread = threading.Thread(target=lambda: ways.append(found(rows)))
        thread.start()
        thread.join()
        if name == "one":
            ways.append(found(rows.coalesce(1)))
            cached = rows.persist()
            ways += [found(cached), found(cached)]
            cached.unpersist()
            rows.sparkSession.conf.set("spark.sql.shuffle.partitions", "7")
            ways.append(found(rows))
        with (folder / f"{name}.txt").open("a") as file:
            file.write(json.dumps(ways) + "\n")

    return each


def start(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query; again where Spark had no patience with the process of ``foreachBatch``.

    That imports half of PySpark before it connects, for which Spark waits ten seconds, whatever the settings: few on a
    machine on which other tests run.
    """
    for _ in range(_STARTS - 1):
        try:
            return writer.start()
        except SparkException as exc:
            if "failed to connect back" not in str(exc):
                raise
    return writer.start()


def refuse_b(batch: holdfast.ShardBatch) -> pa.Table:
    if "b" in batch.keys["key"].to_pylist():
        raise ValueError("no b here")
    return batch.keys


def refusing(events: DataFrame) -> DataFrame:
    grouped = holdfast.stream(events).groupBy("key")
    return grouped.applyInArrowWithState(refuse_b, "key string", "n long", "update", name="refusing")


def counted_twice(events: DataFrame) -> DataFrame:
    """Return what two operators count that share a class, and so a name."""
    events.sparkSession.conf.set("spark.sql.streaming.unsupportedOperationCheck", "false")
    events.sparkSession.conf.set("spark.holdfast.metrics.inProgress", "false")
    return processed(events).union(processed(events))


def explained(frame: DataFrame, folder: Path) -> list[list[str]]:
    """Return what is said of a query that fails: of what it raises, and of what it keeps."""
    writer = frame.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder)).start()
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        kept = query.exception()
        assert kept is not None
        return [holdfast.explain(error).splitlines(), holdfast.explain(kept).splitlines()]
    raise AssertionError("it did not fail")


def by_each_api(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Return the state of each kind of operator, the output of a batch query, and what is said of a failure."""
    events = read(spark, folder)
    spark.conf.set("spark.holdfast.metrics.inProgress", "true")
    query = run(counted(events), folder / "query")
    metrics = [row.asDict() for row in holdfast.metrics(query).drop("timestamp").collect()]
    state = state_of(spark, folder / "query", "counts")
    as_frame = holdfast.state(spark, folder / "query", "counts", columns=["key", "n"]).toArrow()
    assert sorted(as_frame.to_pylist(), key=repr) == state
    keyed = holdfast.stream(events).groupBy("key")
    by_key = keyed.applyInPandasWithState(add_up_by_key, RESULT, "n long", "update", "NoTimeout", name="by_key")
    run(by_key, folder / "query-by-key")
    once = counted(spark.createDataFrame([("a", 1), ("a", 2)], "key string, v long"))
    needed_by_processors(spark)
    initial = spark.sql("select 'b' as key, uuid() as id, rand() as chance").groupBy("key")
    run(processed(events, initialState=initial, name="begun"), folder / "query-begun")
    return {
        "explained": explained(refusing(events), folder / "query-refusing"),
        "metrics": metrics,
        "begun": state_of(spark, folder / "query-begun", "begun", table="v.n"),
        "state": state,
        "state by key": state_of(spark, folder / "query-by-key", "by_key"),
        "batch": [row.asDict() for row in once.collect()],
    }


def by_rarer_ways(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Return the state of a processor without initial state and of timers, and what is said of what cannot be."""
    events = read(spark, folder)
    needed_by_processors(spark)
    run(processed(events, name="processed"), folder / "query-processed")
    return {
        "processed": state_of(spark, folder / "query-processed", "processed", table="v.n"),
        "woken": with_timers(spark, events, folder),
        "refused": refused(spark, events),
        "twice": explained(counted_twice(events), folder / "query-twice"),
        "twice in one line": refused_behind(counted_twice(events)),
    }


def needed_by_processors(spark: SparkSession) -> None:
    for name, value in NEEDED.items():
        spark.conf.set(name, value)


def refused(spark: SparkSession, events: DataFrame) -> list[str]:
    """Return what is said of initial states that are grouped by something else than columns."""
    found = []
    for given in ("select 'b' as key, rand() as chance", "select 'b' as key, 0.5 as chance"):
        frame = spark.sql(given)
        for grouped in (frame.groupBy(F.upper("key").alias("key")), frame.rollup("key")):
            try:
                processed(events, initialState=grouped, name="refused")
            except InvalidArgumentError as exc:
                found.append(str(exc))
    return found


def refused_behind(frame: DataFrame) -> str:
    """Return what is said of an operator behind others."""
    try:
        holdfast.stream(frame).dropDuplicates(["key"], ttl="1 day")
    except InvalidArgumentError as exc:
        return str(exc)
    raise AssertionError("it was not refused")


def keep_shards(spark: SparkSession) -> None:
    """Say the number of shards where tasks do not know their run: in `foreachBatch` over Connect before Spark 4.3."""
    if spark.version.startswith(("4.0.", "4.1.", "4.2.")):
        spark.conf.set("spark.holdfast.shards", "4")


def in_foreach_batch(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Start one data frame as two queries that use ``foreachBatch``, twice; return what the micro-batches found."""
    queries = ("one", "two")
    keep_shards(spark)
    for feed in (folder / "input", folder / "more"):
        if feed.name == "more":
            read_on(folder)
        counts, started = counted(read(spark, folder), "each"), []
        for query in queries:
            writer = counts.writeStream.foreachBatch(evaluate(folder, query)).outputMode("update")
            writer = writer.trigger(availableNow=True).option("checkpointLocation", str(folder / query))
            started.append(start(writer))
        for each in started:
            each.awaitTermination()
    found: dict[str, Any] = {}
    for query in queries:
        found[query] = [json.loads(line) for line in (folder / f"{query}.txt").read_text().splitlines()]
        found[f"state of {query}"] = state_of(spark, folder / query, "each")
    return found


class CountRows(StatefulProcessor):
    """Counts the rows of each key; an initial row counts ten."""

    def init(self, handle: Any) -> None:
        self._n = handle.getValueState("n", "n long")

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        assert len(initialState.id) == 36
        assert 0 <= initialState.chance < 1
        self._n.update((10,))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = self._n.get() or (0,)
        self._n.update((before[0] + sum(1 for _ in rows),))
        yield Row(key=key[0], n=self._n.get()[0])


def wake(batch: holdfast.ShardBatch) -> pa.Table:
    """Set each key's timer to a time that has passed, and keep how often it was due."""
    is_due = pc.is_valid(batch.timers.due_ms)
    seen = batch.states["seen"]
    seen.put(n=pc.add(pc.coalesce(seen.get()["n"], 0), is_due.cast(pa.int64())))
    batch.timers.set([0] * batch.keys.num_rows, where=pc.greater(batch.groups.count(), 0))
    return batch.keys.append_column("n", seen.get()["n"])


def with_timers(spark: SparkSession, events: DataFrame, folder: Path) -> list[dict[str, Any]]:
    """Run a query with timers in event time and a state table that expires; return its state."""
    timed = events.selectExpr("key", "timestamp_seconds(v) as at").withWatermark("at", "0 seconds")
    seen = {"seen": holdfast.StateTable("n long", ttlDurationMs=3_600_000)}
    keyed = holdfast.stream(timed).groupBy("key")
    woken = keyed.applyInArrowWithState(wake, RESULT, seen, "update", name="woken", timeMode="EventTime")
    run(woken, folder / "query-woken")
    state = holdfast.read_state(spark, folder / "query-woken", "woken", table="seen").select(["key", "n"])
    return sorted(state.to_pylist(), key=repr)


def by_savepoint(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Save a query after its second file, and let it and what is restored read the third one; return what is found."""

    def ran(query: str, durable: str) -> list[dict[str, Any]]:
        spark.conf.set("spark.holdfast.state.dir", str(folder / durable))
        run(counted(read(spark, folder)), folder / query)
        return state_of(spark, folder / query, "counts")

    ran("query", "durable")
    savepoints.create(spark, folder / "query", folder / "savepoints", "one")
    saved = savepoints.load(spark, folder / "savepoints", "one").drop("shard").toArrow().to_pylist()
    spark.conf.set("spark.holdfast.state.dir", str(folder / "durable-again"))
    savepoints.restore(spark, folder / "savepoints", "one", folder / "again", shards=3)
    read_on(folder)
    return {
        "saved": sorted(saved, key=repr),
        "original": ran("query", "durable"),
        "restored": ran("again", "durable-again"),
    }


def by_draining(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Drain a query, restore it, and let that read on; return how many clicks each session had, by then."""
    keep_shards(spark)

    def feed(number: int, *clicks: tuple[str, int]) -> None:
        rows = [{"user": user, "at": datetime(2026, 3, 2, 9 + hour, tzinfo=UTC)} for user, hour in clicks]
        schema = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
        add_file(folder / "clicks", number, pa.Table.from_pylist(rows, schema))

    def writer(query: str) -> DataStreamWriter:
        clicks = spark.readStream.schema(sessions.CLICKS).option("maxFilesPerTrigger", 1)
        shown = sessions.vectorised_sessions(clicks.parquet(str(folder / "clicks"))).writeStream.format("parquet")
        shown = shown.outputMode("append").trigger(availableNow=True).option("path", str(folder / f"shown-{query}"))
        return shown.option("checkpointLocation", str(folder / query))

    def shown(query: str) -> list[Any]:
        # As files: Spark reads what its sink wrote only if that began with micro-batch 0.
        tables = map(pq.read_table, (folder / f"shown-{query}").glob("*.parquet"))
        return sorted([row["user"], row["clicks"]] for table in tables for row in table.to_pylist())

    feed(0, ("ann", 0), ("ann", 0), ("bob", 0))
    feed(1, ("cid", 2))
    feed(2, ("cid", 2))
    query = writer("query").start()
    query.awaitTermination()
    found = {"before": shown("query")}
    savepoints.drain(spark, query, writer("query"), folder / "query", folder / "savepoints", "end")
    found["drained"] = shown("query")
    spark.conf.set("spark.holdfast.state.dir", str(folder / "durable-again"))
    savepoints.restore(spark, folder / "savepoints", "end", folder / "again", shards=3)
    feed(3, ("cid", 2), ("end", 9))
    feed(4, ("end", 9))
    writer("again").start().awaitTermination()
    return found | {"again": shown("again")}


def into_a_sink(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Show a query's results in a folder of CSV files, over two starts, the second with a decided micro-batch."""
    spark.conf.set("spark.holdfast.sink.csv.password", "s3cr3t")
    keep_shards(spark)
    sink = Guarded(str(folder / "shown"))
    for feed in (folder / "input", folder / "more"):
        if feed.name == "more":
            read_on(folder)
            (folder / "query/commits/1").unlink()
        write = sinks.exactly_once(sink, query_name="shown")
        writer = counted(read(spark, folder)).writeStream.foreachBatch(write).outputMode("update")
        writer = writer.trigger(availableNow=True).option("checkpointLocation", str(folder / "query"))
        start(writer).awaitTermination()
    schema = pa.schema({"key": pa.string(), "n": pa.int64()})
    return {"shown": sorted(csv_folder.read(str(folder / "shown"), schema).to_pylist(), key=repr)}


class Guarded(csv_folder.CsvFolder):
    """A sink whose workers need a password, which Connect leaves out of its lists of settings."""

    credentials = ("password",)

    def begin(self, attempt: sinks.SinkAttempt, schema: pa.Schema) -> sinks.SinkTransaction:
        assert attempt.query.options["password"] == "s3cr3t", attempt.query.options
        return super().begin(attempt, schema)


PARTS: dict[str, Callable[[SparkSession, Path], dict[str, Any]]] = {
    "each API": by_each_api,
    "rarer ways": by_rarer_ways,
    "in foreachBatch": in_foreach_batch,
    "savepoints": by_savepoint,
    "drain": by_draining,
    "sink": into_a_sink,
}


def main(folder: Path, part: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.remote("local[2]")
    for key, value in settings_of(folder).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    print("RESULT", json.dumps(PARTS[part](spark, folder)))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
