"""The code that the documents show runs as it stands on Spark, and gives what they say.

`tests/test_shown_code.py` runs what needs no Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession, functions

import holdfast
from holdfast import savepoints
from holdfast.settings import Settings
from tests.input_files import add_file
from tests.pages import block_with
from tests.spark.parity.engines import configured

pytestmark = pytest.mark.spark


def test_the_function_by_key_of_the_guide_gives_right_totals(spark: SparkSession, tmp_path: Path) -> None:
    events = spark.createDataFrame([("ann", 5.0), ("ann", 7.0), ("bob", 1.0)], "user string, amount double")
    events.coalesce(1).write.parquet(str(tmp_path / "events"))
    names: dict[str, Any] = {"pd": pd, "holdfast": holdfast}
    names["df"] = spark.readStream.schema(events.schema).parquet(str(tmp_path / "events"))
    with configured(spark, {"spark.holdfast.state.dir": str(tmp_path / "app")}):
        exec(block_with("docs/operators.md", "def running("), names)  # the document is ours
        writer = names["out"].writeStream.outputMode("update").format("memory").queryName("by_key")
        location = str(tmp_path / "query")
        writer.option("checkpointLocation", location).trigger(availableNow=True).start().awaitTermination(120)
        rows = {tuple(row) for row in spark.table("by_key").collect()}
        reading = block_with("docs/operators.md", "read_state").replace("/data/app-spark", location)
        exec(reading.replace('"totals"', '"running"'), names | {"spark": spark}, names)
    assert rows == {("ann", 2, 12.0), ("bob", 1, 1.0)}
    assert {row["user"]: row["n"] for row in names["table"].to_pylist()} == {"ann": 2, "bob": 1}


def test_the_vectorised_operator_of_the_guide_runs(spark: SparkSession) -> None:
    legs = [("N1", "BOS", 1), ("N1", "DCA", 2), ("N2", "ORD", 1)]
    names: dict[str, Any] = {"df": spark.createDataFrame(legs, "aircraft string, airport string, departed long")}
    exec(block_with("docs/operators.md", "def sessions("), names)  # the document is ours
    assert {tuple(row) for row in names["out"].collect()} == {("N1", 2, "DCA"), ("N2", 1, "ORD")}


@pytest.mark.parametrize("document", ["docs/backends.md", "examples/parquet_backend/README.md"])
def test_backends_are_chosen_as_the_guides_show(document: str, spark: SparkSession) -> None:
    known = {"parquet": {"compression": "snappy"}, "rocksdb": {"memory": "1g"}}
    try:
        exec(block_with(document, '"spark.holdfast.backend"'), {"spark": spark})
        settings = Settings.parse(dict(spark.conf.getAll), known)
    finally:
        for name in dict(spark.conf.getAll):
            if name.startswith("spark.holdfast."):
                spark.conf.unset(name)
    assert settings.backend_options == known[settings.backend]


ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
NINE = datetime(2026, 1, 1, 9, tzinfo=UTC)


@pytest.fixture
def kept(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """Give queries a state directory, and return the folder for their locations."""
    spark.conf.set("spark.holdfast.state.dir", str(tmp_path / "app"))
    yield tmp_path
    spark.conf.unset("spark.holdfast.state.dir")
    spark.conf.unset("spark.sql.streaming.stateStore.providerClass")


Streamed = Callable[..., "DataFrame"]


@pytest.fixture
def streamed(spark: SparkSession, tmp_path: Path) -> Streamed:
    """Return what makes a stream of a micro-batch for each list of rows."""

    def made(schema: str, *batches: list[dict[str, Any]]) -> DataFrame:
        folder = tmp_path / f"input-{len(list(tmp_path.glob('input-*')))}"
        for number, rows in enumerate(batches):
            add_file(folder, number, pa.Table.from_pylist(rows))
        return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))

    return made


def shown(df: DataFrame, mode: str, location: Path, *, no_data: bool = True) -> list[tuple[Any, ...]]:
    """Run a query on what there is to read; return the rows that it shows, by micro-batch.

    `no_data`: whether micro-batches without rows run, too; in processing time these never end.
    """
    found: list[tuple[Any, ...]] = []
    writer = df.writeStream.outputMode(mode).option("checkpointLocation", str(location))
    with configured(df.sparkSession, {"spark.sql.streaming.noDataMicroBatches.enabled": str(no_data).lower()}):
        query = writer.foreachBatch(lambda rows, _: found.extend(map(tuple, rows.collect()))).start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()
    return found


@pytest.mark.all
@pytest.mark.slow(20)
def test_operators_in_one_line_run_as_the_guide_shows(spark: SparkSession, kept: Path, streamed: Streamed) -> None:
    """Each line of the list is taken as it stands, and so are Spark's own join and a chain; the chain gives rows."""
    at = {minute: NINE + timedelta(minutes=minute) for minute in (0, 5, 7, 200)}
    one = {"id": 1, "user": "ann", "delay": 5.0, "item": "tea", "price": 30.0, "currency": "EUR"}
    names: dict[str, Any] = {
        "holdfast": holdfast,
        "F": functions,
        "spark": spark,
        "df": streamed(
            "id long, user string, delay double, item string, price double, currency string, at timestamp, "
            "`order` long, customer string",
            [one | {"at": at[5], "order": 7, "customer": "ann"}],
            [one | {"at": at[200], "order": 8, "customer": "bob"}],
        ),
        "payments": streamed(
            "`order` long, paid timestamp", [{"order": 7, "paid": at[7]}], [{"order": 8, "paid": at[200]}]
        ).withWatermark("paid", "10 minutes"),
        "rates": streamed(
            "currency string, at timestamp, rate double", [{"currency": "EUR", "at": at[0], "rate": 1.1}]
        ).withWatermark("at", "10 minutes"),
    }
    exec(block_with("docs/operators.md", "dropDuplicatesWithinWatermark"), names)  # the document is ours
    orders = names["df"].withWatermark("at", "10 minutes")
    renamed = names["payments"].withColumnRenamed("order", "paid_order")
    exec(block_with("docs/operators.md", "near = "), names | {"orders": orders, "payments": renamed})
    names |= {"orders": holdfast.stream(orders), "payments": holdfast.stream(names["payments"])}
    exec(block_with("docs/operators.md", "pairs = ").replace("\nholdfast.stream", "\nchain = holdfast.stream"), names)
    ((customer, window, n),) = shown(names["chain"], "append", kept / "chain")
    assert (customer, n) == ("ann", 1)
    assert window["start"].hour == 9


@pytest.mark.slow(5)
def test_state_tables_and_timers_run_as_the_guide_shows(kept: Path, streamed: Streamed) -> None:
    """The tables that it declares are the function's; the function with timers calls each idle key."""
    names: dict[str, Any] = {"holdfast": holdfast, "pa": pa, "pc": pc}
    exec(block_with("docs/operators.md", "states = {"), names)
    exec(block_with("docs/operators.md", "def idle("), names)

    def fill(batch: holdfast.ShardBatch) -> pa.Table:
        ids = pa.array(["x"] * batch.keys.num_rows)
        batch.states["cart"].put(items=pa.array([["tea"]] * batch.keys.num_rows))
        batch.states["seen"].put(id=ids)
        return batch.keys.append_column("id", batch.states["seen"].get()["id"])

    events = streamed("user string, at_ms long", [{"user": "ann", "at_ms": 1}], [{"user": "bob", "at_ms": 2}])
    by_user = holdfast.stream(events).groupBy("user")
    carts = by_user.applyInArrowWithState(fill, "user string, id string", names["states"], "update", name="carts")
    assert sorted(shown(carts, "update", kept / "carts")) == [("ann", "x"), ("bob", "x")]
    idle = by_user.applyInArrowWithState(
        names["idle"], "user string", "n long", "update", name="idle", timeMode="ProcessingTime"
    )
    assert ("ann",) in shown(idle, "update", kept / "idle", no_data=False)


@pytest.mark.slow(10)
def test_a_rename_and_a_migration_run_as_the_guide_shows(spark: SparkSession, kept: Path, streamed: Streamed) -> None:
    """The renamed column keeps its values, and the migrated one is in seconds."""
    events = streamed("user string, delay_ms long", [{"user": "ann", "delay_ms": 4_500}])

    def before(batch: holdfast.ShardBatch) -> dict[str, pa.Array]:
        n = batch.groups.count()
        batch.state.put(n=n, note=pa.array(["?"] * len(n)))
        return {"total": n}

    def add_up(batch: holdfast.ShardBatch) -> dict[str, pa.Array]:
        total = pc.add(batch.state.get(default={"total": 0})["total"], batch.groups.count())
        batch.state.put(total=total)
        return {"total": total}

    def delays(batch: holdfast.ShardBatch) -> dict[str, pa.Array]:
        batch.state.put(delay_ms=batch.groups.sum("delay_ms"))
        return {"n": batch.groups.count()}

    by_user = holdfast.stream(events).groupBy("user")
    first = by_user.applyInArrowWithState(
        before, "user string, total long", "n long, note string", "update", name="totals"
    )
    assert shown(first, "update", kept / "renamed") == [("ann", 1)]
    add_file(kept / "input-0", 1, pa.table({"user": ["ann"], "delay_ms": [1_500]}))
    names: dict[str, Any] = {"holdfast": holdfast, "df": events, "add_up": add_up, "spark": spark}
    exec(block_with("docs/state-schema.md", "stateChanges={"), names)
    assert shown(names["out"], "update", kept / "renamed") == [("ann", 2)]

    spark.conf.set("spark.holdfast.state.dir", str(kept / "app-2"))
    out = by_user.applyInArrowWithState(delays, "user string, n long", "delay_ms long", "update", name="totals")
    shown(out, "update", kept / "delays")
    savepoints.create(spark, kept / "delays", kept / "savepoints", "before-upgrade")
    migrating = block_with("docs/state-schema.md", "in_seconds")
    migrating = migrating.replace("s3://bucket/savepoints", str(kept / "savepoints"))
    exec(migrating.replace("/data/app-spark-2", str(kept / "migrated")), names)
    found = holdfast.read_state(spark, kept / "migrated", "totals")
    assert [(row["user"], row["delay"]) for row in found.to_pylist()] == [("ann", 1)]


@pytest.mark.all
@pytest.mark.slow(15)
def test_processors_run_as_the_guide_shows(spark: SparkSession, kept: Path, streamed: Streamed) -> None:
    """Its class, its initial state, and a window of Spark's behind a processor."""
    page = "docs/transform-with-state.md"
    names: dict[str, Any] = {"spark": spark, "holdfast": holdfast}
    exec(block_with(page, "providerClass"), names)
    names["events"] = streamed(
        "user string, page string, at timestamp",
        *([{"user": "ann", "page": "/", "at": NINE + timedelta(minutes=minute)}] for minute in (0, 5, 300)),
    ).withWatermark("at", "1 minute")
    exec(block_with(page, "class Visits"), names)
    assert shown(names["visits"], "update", kept / "visits", no_data=False) == [("ann", 1), ("ann", 2), ("ann", 3)]

    counting = "def handleInputRows(self, key, rows, timerValues):\n        n = self.total.get()[0] + len(list(rows))"
    counting += "\n        self.total.update((n,))\n        yield Row(user=key[0], n=n)\n"
    names["known"] = spark.createDataFrame([("ann", 5)], "user string, n long")
    exec(block_with(page, "handleInitialState").replace("...\n", counting), names)
    assert shown(names["totals"], "update", kept / "totals")[-1] == ("ann", 8)

    exec(SESSIONS, names)
    exec(block_with(page, "eventTimeColumnName"), names)
    ((hour, count),) = shown(names["per_hour"], "append", kept / "sessions")
    assert (hour["start"].hour, count) == (9, 2)


#: Each row is a session.
SESSIONS = """
class Sessions(StatefulProcessor):
    def init(self, handle): ...
    def handleInputRows(self, key, rows, timerValues):
        yield from (Row(user=key[0], started=row.at, n=1) for row in rows)
"""
