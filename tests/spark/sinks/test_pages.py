"""The code of the sinks' pages runs as it stands, but for the names of servers, and shows each row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from holdfast import sinks
from holdfast.spark_integration.sinks.postgres import connecting
from tests.pages import block_with, blocks
from tests.read_kafka import committed
from tests.servers.kafka import Kafka
from tests.servers.postgres import Postgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.all, pytest.mark.slow(30)]

TypeIn = Callable[..., dict[str, Any]]


@pytest.fixture
def type_in(spark: SparkSession, tmp_path: Path) -> Iterator[TypeIn]:
    """Return what runs a page's block on streams of some rows until all is shown, and gives the names that it made."""

    def typed(
        page: str,
        part: str,
        streams: Mapping[str, pa.Table],
        replaced: Mapping[str, str],
        settings: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        names: dict[str, Any] = {"spark": spark, "sinks": sinks}
        for name, rows in streams.items():
            folder = tmp_path / f"rows-of-{name}"
            folder.mkdir()
            pq.write_table(rows, folder / "0.parquet")
            names[name] = spark.readStream.schema(spark.read.parquet(str(folder)).schema).parquet(str(folder))
        for setting, value in (settings or {}).items():
            spark.conf.set(f"spark.holdfast.sink.{setting}", value)
        code = block_with(page, part).replace('"/data/', f'"{tmp_path}/')
        for old, new in replaced.items():
            assert old in code
            code = code.replace(old, new)
        exec(code, names)  # the document is ours
        for query in spark.streams.active:
            query.processAllAvailable()
            query.stop()
        return names

    yield typed
    for query in spark.streams.active:
        query.stop()
    for name in dict(spark.conf.getAll):
        if name.startswith("spark.holdfast."):
            spark.conf.unset(name)


@pytest.fixture
def table(postgres: Postgres) -> Iterator[Callable[[str], list[tuple[Any, ...]]]]:
    """Return what runs a statement where the tables of the pages are, until the end of the test."""

    def sql(statement: str) -> list[tuple[Any, ...]]:
        with postgres.connect() as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    sql("CREATE TABLE totals (user_name text PRIMARY KEY, carrier text UNIQUE, n bigint)")
    sql("CREATE TABLE alerts (carrier text, n bigint)")
    yield sql
    connecting.close_idle()
    sql("DROP TABLE totals, alerts")
    sql("DELETE FROM holdfast_sinks WHERE sink IN ('totals', 'alerts')")


def login(postgres: Postgres, sink: str, *but: str) -> dict[str, str]:
    """Return a sink's settings that a page leaves to its reader."""
    return {f"{sink}.{name}": value for name, value in postgres.options.items() if name not in but}


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("page", "key", "says"), [("postgres-sink", "user_name", ("host", "dbname")), ("sinks", "carrier", ("host",))]
)
def test_a_table_in_postgresql(
    page: str, key: str, says: tuple[str, ...], type_in: TypeIn, table: Callable[..., Any], postgres: Postgres
) -> None:
    rows = pa.table({"user_name": ["ann", "bob"], "carrier": ["AA", "UA"], "n": [1, 2]})
    settings = login(postgres, "totals", *says)
    type_in(f"docs/{page}.md", f'keys=["{key}"]', {"totals": rows}, {"db.example.com": "127.0.0.1"}, settings)
    assert table("SELECT * FROM totals ORDER BY n") == [("ann", "AA", 1), ("bob", "UA", 2)]
    queries = [line for line in blocks("docs/postgres-sink.md", "sql")[0].splitlines() if line.startswith("SELECT")]
    prepared, marks, _ = map(table, queries)  # other tests' too
    assert [row for row in prepared if ":totals:" in row[0]] == []
    assert "totals" in {mark[0] for mark in marks}


@pytest.mark.postgres
@pytest.mark.since("4.1")
def test_a_sink_as_a_data_source(type_in: TypeIn, table: Callable[..., Any], postgres: Postgres) -> None:
    rows = pa.table({"carrier": ["AA", "UA"], "n": [1, 2]})
    type_in("docs/sinks.md", 'format("holdfast-postgres")', {"alerts": rows}, {}, login(postgres, "alerts"))
    assert table("SELECT * FROM alerts ORDER BY n") == [("AA", 1), ("UA", 2)]


@pytest.mark.kafka
def test_a_topic(type_in: TypeIn, kafka: Kafka) -> None:
    """Without TLS, which the test's brokers do not have beside a login."""
    kafka.add_scram_user()
    topic = kafka.add_topic()
    brokers = {"broker-1:9093,broker-2:9093": kafka.sasl_servers, "SASL_SSL": "SASL_PLAINTEXT"}
    login = kafka.sasl_options("SCRAM-SHA-512")
    type_in(
        "docs/kafka-sink.md",
        "sinks.kafka(",
        {"alerts": pa.table({"card": ["a", "b"], "n": [1, 2]})},
        brokers | {'"alerts", "alerts"': f'"alerts", "{topic}"'},
        {f"alerts.{name}": login[name] for name in ("sasl.username", "sasl.password")},
    )
    found = {(message.key(), json.loads(message.value() or b"")["n"]) for message in committed(kafka, topic)}
    assert found == {(b"a", 1), (b"b", 2)}


def test_delta_tables(type_in: TypeIn, tmp_path: Path) -> None:
    rows = pa.table({"day": ["mon", "tue"], "account": ["a", "b"], "n": [1, 2]})
    streams = {"events": rows, "totals": rows.select(["account", "n"])}
    type_in("docs/file-sinks.md", "sinks.delta(", streams, {"s3://lake": f"{tmp_path}/lake"})
    found = {name: DeltaTable(f"{tmp_path}/lake/{name}") for name in streams}
    assert found["events"].metadata().partition_columns == ["day"]
    for name, written in streams.items():
        shown = pa.table(found[name].to_pyarrow_table()).select(written.column_names).sort_by("n")
        assert shown.to_pylist() == written.to_pylist()


def test_parquet_files(type_in: TypeIn, spark: SparkSession, tmp_path: Path) -> None:
    """The page's sink shows the rows to both of its readers."""
    here = {"s3://lake": f"{tmp_path}/lake", '"/lake': f'"{tmp_path}/lake', ', options={"key": "…", "secret": "…"}': ""}
    spark.conf.set("spark.holdfast.state.dir", f"{tmp_path}/app")
    rows = pa.table({"key": ["a", "b"], "total": [1, 2]})
    folder = tmp_path / "first"
    folder.mkdir()
    pq.write_table(rows, folder / "0.parquet")
    sink = sinks.parquet("out", f"{tmp_path}/lake/out")
    writer = spark.readStream.schema("key string, total long").parquet(str(folder)).writeStream
    writer = writer.option("checkpointLocation", f"{tmp_path}/out").foreachBatch(sinks.exactly_once(sink))
    writer.trigger(availableNow=True).start().awaitTermination()
    names = type_in("docs/file-sinks.md", "read_parquet", {}, here)
    assert names["table"].sort_by("key").to_pylist() == rows.to_pylist()
    assert sum(pq.read_table(file).num_rows for file in names["files"]) == 2
