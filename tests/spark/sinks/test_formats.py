"""The formats of holdfast's sinks: Spark finds them by name, and a reader finds each row once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

import holdfast
from holdfast import clock, sinks
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.sink_source.options import SourceOptions
from holdfast.spark_integration.sink_source.registering import SINK_SOURCES, DeltaSource, PostgresSource
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from tests.read_kafka import committed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.sinks import SinkSource
    from tests.servers.kafka import Kafka
    from tests.servers.postgres import Postgres

pytestmark = [pytest.mark.spark, pytest.mark.slow(40)]
since_data_sources = pytest.mark.since("4.1")
ROWS = 10


@pytest.fixture
def session(spark: SparkSession, tmp_path: Path) -> Iterator[SparkSession]:
    before = dict(spark.conf.getAll)
    spark.conf.set("spark.holdfast.state.dir", str(tmp_path / "durable"))
    yield spark
    for name in dict(spark.conf.getAll).keys() - before.keys():
        spark.conf.unset(name)


def written(spark: SparkSession, sink: sinks.TwoPhaseSink, rows: str, tmp_path: Path, **options: str) -> list[int]:
    """Write three micro-batches in as many runs; return the numbers that must be there.

    Nobody registers the formats: Spark finds them.
    """
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load().selectExpr(rows)
    writer = numbers.writeStream.options(**sinks.source_options(spark, sink)).trigger(once=True)
    writer = writer.options(name=sink.name, checkpointLocation=str(tmp_path / "query"), **options)
    for _ in range(3):
        writer.format(f"holdfast-{type(sink).__name__.removesuffix('Sink').lower()}").start().awaitTermination()
    return list(range(3 * ROWS))


@pytest.mark.all
@since_data_sources
def test_parquet(session: SparkSession, tmp_path: Path) -> None:
    url = str(tmp_path / "target")
    wanted = written(session, sinks.parquet("files", url), "value", tmp_path, path=url)
    assert sorted(sinks.read_parquet(url)["value"].to_pylist()) == wanted


@pytest.mark.all
@since_data_sources
def test_delta(session: SparkSession, tmp_path: Path) -> None:
    url = str(tmp_path / "target")
    wanted = written(session, DeltaSink("table", url), "value", tmp_path, path=url, create="true")
    assert sorted(DeltaTable(url).to_pyarrow_table()["value"].to_pylist()) == wanted


@since_data_sources
def test_postgres(session: SparkSession, postgres: Postgres, tmp_path: Path) -> None:
    """Where the server is stands in the session, for the workers; the driver has it from options."""
    name = f"numbers_{clock.new_id()}"
    for option, value in postgres.options.items():
        session.conf.set(f"spark.holdfast.sink.{name}.{option}", value)
    wanted = written(session, sinks.postgres(name, name), "value", tmp_path, table=name, create="true")
    with postgres.connect() as connection:
        assert [value for (value,) in connection.execute(f"SELECT value FROM {name} ORDER BY value")] == wanted


@pytest.mark.all
@pytest.mark.kafka
@since_data_sources
def test_kafka(session: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    """Over a login, whose password the workers have from the session."""
    name, topic = f"numbers-{clock.new_id()}", kafka.add_topic(2)
    for option, value in kafka.sasl_options().items():
        session.conf.set(f"spark.holdfast.sink.{name}.{option}", value)
    wanted = written(session, sinks.kafka(name, topic), "CAST(value AS STRING) AS value", tmp_path, topic=topic)
    assert sorted(int(message.value() or b"") for message in committed(kafka, topic)) == wanted


@pytest.mark.parametrize("source", SINK_SOURCES)
def test_a_missing_option_is_named(source: type[SinkSource]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"give the option name, format={source.name()}"):
        source({}).sink()


def test_options_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="the option create must be true or false"):
        PostgresSource({"name": "n", "table": "t", "create": "yes"}).sink()
    for number in ("two", "1.5", "-1", "9" * 5000):
        with pytest.raises(InvalidArgumentError, match="the option file_mb is a whole number"):
            DeltaSource({"name": "n", "path": "t", "file_mb": number}).sink()
    given = {"name": "n", "table": "t", "keys": "a, b"}
    assert PostgresSource(given).sink() == sinks.postgres("n", "t", keys=["a", "b"])


def test_registered_twice(spark: SparkSession) -> None:
    """Where Spark has found them, registering changes nothing; names of options keep their case on the way."""
    holdfast.register(spark)
    holdfast.register(spark)


@since_data_sources
def test_names_with_capitals_arrive(session: SparkSession, tmp_path: Path) -> None:
    """Spark hands names of options over in lower case."""
    sink = DeltaSink("table", str(tmp_path / "target"))
    given = {"delta.AWS_ACCESS_KEY_ID": "a", "delta.AWS_REGION": "b", "key": "c"}
    for option, value in given.items():
        session.conf.set(f"spark.holdfast.sink.table.{option}", value)
    options = sinks.source_options(session, sink) | {"checkpointLocation": str(tmp_path), "path": sink.url}
    lower = {name.lower(): value for name, value in options.items()}
    assert SourceOptions.parse(lower, sink, ["name", "path"]).sink == given
