"""Sinks as data sources of Spark, found by name: a reader finds each row once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import DataStreamWriter
from pyspark.sql.types import StructType

from holdfast import clock, sinks
from holdfast.errors import InvalidArgumentError
from holdfast.examples.sinks.csv_folder import CsvFolder, read
from holdfast.sinks import SinkSource
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.sink_source import (
    SINK_SOURCES,
    Begun,
    DeltaSource,
    PostgresSource,
    SourceOptions,
    Written,
)
from holdfast.spark_integration.sinks.coordinator import Coordinator
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from tests.read_kafka import committed
from tests.spark.sinks.csv_source import CsvSource

if TYPE_CHECKING:
    from tests.servers.kafka import Kafka
    from tests.servers.postgres import Postgres

pytestmark = [pytest.mark.spark, pytest.mark.slow(20)]


since_data_sources = pytest.mark.since("4.1")
ROWS = 10


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


@pytest.mark.slow(40)
@pytest.mark.all
@since_data_sources
def test_parquet(session: SparkSession, tmp_path: Path) -> None:
    url = str(tmp_path / "target")
    wanted = written(session, sinks.parquet("files", url), "value", tmp_path, path=url)
    assert sorted(sinks.read_parquet(url)["value"].to_pylist()) == wanted


@pytest.mark.slow(40)
@pytest.mark.all
@since_data_sources
def test_delta(session: SparkSession, tmp_path: Path) -> None:
    url = str(tmp_path / "target")
    wanted = written(session, DeltaSink("table", url), "value", tmp_path, path=url, create="true")
    assert sorted(DeltaTable(url).to_pyarrow_table()["value"].to_pylist()) == wanted


@pytest.mark.slow(40)
@since_data_sources
def test_postgres(session: SparkSession, postgres: Postgres, tmp_path: Path) -> None:
    """Where the server is stands in the session, for the workers; the driver has it from options."""
    name = f"numbers_{clock.new_id()}"
    for option, value in postgres.options.items():
        session.conf.set(f"spark.holdfast.sink.{name}.{option}", value)
    wanted = written(session, sinks.postgres(name, name), "value", tmp_path, table=name, create="true")
    with postgres.connect() as connection:
        assert [value for (value,) in connection.execute(f"SELECT value FROM {name} ORDER BY value")] == wanted


@pytest.mark.slow(40)
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


@pytest.mark.slow(40)
@pytest.mark.parametrize("source", SINK_SOURCES)
def test_a_missing_option_is_named(source: type[SinkSource]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"missing option name, format={source.name()}"):
        source({}).sink()


@pytest.mark.slow(40)
def test_options_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="the option create must be true or false"):
        PostgresSource({"name": "n", "table": "t", "create": "yes"}).sink()
    for number in ("two", "1.5", "-1", "9" * 5000):
        with pytest.raises(InvalidArgumentError, match="the option file_mb must be a whole number"):
            DeltaSource({"name": "n", "path": "t", "file_mb": number}).sink()
    given = {"name": "n", "table": "t", "keys": "a, b"}
    assert PostgresSource(given).sink() == sinks.postgres("n", "t", keys=["a", "b"])


@pytest.mark.slow(40)
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


SCHEMA = pa.schema([("value", pa.int64()), ("twice", pa.int64())])


class Stream:
    """A stream of numbers into a folder, some micro-batches at a time."""

    def __init__(self, session: SparkSession, folder: Path) -> None:
        self.session, self.folder = session, folder
        self.sink = CsvFolder(str(folder / "shown"))

    def writer(self, rows: str = "value | value * 2 AS twice") -> DataStreamWriter:
        numbers = self.session.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS)
        writer = numbers.option("numPartitions", 2).load().selectExpr(*rows.split(" | ")).writeStream
        writer = writer.format("csv-folder").options(**sinks.source_options(self.session, self.sink))
        return writer.option("checkpointLocation", str(self.folder / "query")).option("path", self.sink.folder)

    def run_to(self, batch_id: int, writer: DataStreamWriter | None = None) -> None:
        """Run until so many micro-batches were shown."""
        query = (writer or self.writer()).start()
        try:
            while query.isActive and (query.lastProgress is None or query.lastProgress["batchId"] < batch_id):
                query.awaitTermination(0.1)
        finally:
            query.stop()
        if query.exception():
            raise query.exception()

    def shown(self) -> list[int]:
        return sorted(read(self.sink.folder, SCHEMA)["value"].to_pylist())


@pytest.fixture
def stream(session: SparkSession, tmp_path: Path) -> Stream:
    session.dataSource.register(CsvSource)
    return Stream(session, tmp_path)


@pytest.mark.since("4.1")
def test_micro_batches_are_shown_once(stream: Stream) -> None:
    """Over two starts, the first of which is stopped wherever it is."""
    stream.run_to(2)
    assert stream.shown()[: 3 * ROWS] == list(range(3 * ROWS))
    stream.run_to(5)
    shown = stream.shown()
    assert shown == list(range(len(shown)))
    assert len(shown) >= 6 * ROWS
    assert len(shown) % ROWS == 0


@pytest.mark.since("4.1")
def test_a_repeated_micro_batch_is_not_written_again(stream: Stream) -> None:
    """Killed before Spark's commit log: the decision stands, the operators run, and no row comes twice."""

    def run_one() -> None:
        """No other micro-batch follows: stopped in its middle, it would leave parts."""
        stream.run_to(len(list(commits.glob("[0-9]*"))), stream.writer().trigger(processingTime="1 hour"))

    commits = stream.folder / "query" / "commits"
    run_one()
    run_one()
    (commits / "1").unlink()
    run_one()
    assert stream.shown() == list(range(2 * ROWS))
    parts = len(list(Path(stream.sink.folder).glob("part-*")))
    assert parts == 2 * len(list(Path(stream.sink.folder).glob("list-*"))), "nothing was prepared in vain"


@pytest.mark.since("4.1")
@pytest.mark.all
def test_a_failed_micro_batch_leaves_nothing(stream: Stream) -> None:
    """One task fails for good when the other has prepared: the next start shows both, once."""
    stream.run_to(1)
    before = len(stream.shown())
    failing = "value | IF(value % 2 = 1 AND value > 30, CAST(raise_error('not today') AS LONG), value * 2) AS twice"
    with pytest.raises(StreamingQueryException, match="not today"):
        stream.run_to(99, stream.writer(failing))
    stream.run_to(before // ROWS + 4)
    shown = stream.shown()
    assert shown == list(range(len(shown)))
    assert len(shown) > before


@pytest.mark.since("4.1")
@pytest.mark.all
def test_a_failed_commit_gives_up_nothing_decided(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark calls abort then, in another process, which cannot know how far the commit came: the next start can."""
    stream.run_to(0)
    options = {**sinks.source_options(stream.session, stream.sink), "path": stream.sink.folder}
    options["checkpointLocation"] = str(stream.folder / "query")
    schema = StructType().add("value", "long").add("twice", "long")
    writer = CsvSource(options).streamWriter(schema, overwrite=False)
    given_up: list[str] = []
    monkeypatch.setattr(Coordinator, "give_up", lambda self: given_up.append("all"))
    begun = Begun("a-query", 1, "", 3, is_decided=False)
    writer.abort([Written(0, 1, "{}", begun), Written(1, 0, "", begun)], 1)
    assert given_up == []
    writer.abort([Written(0, 1, "{}", begun), None], 1)
    assert given_up == ["all"]


@pytest.mark.since("4.1")
@pytest.mark.parametrize("left_out", ["checkpointLocation", "spark.holdfast.state.dir"])
def test_what_is_missing_is_named(left_out: str, tmp_path: Path) -> None:
    """Spark hands a source no settings: an option that is left out is asked for, before anything is written."""
    given = {
        "checkpointLocation": str(tmp_path / "query"),
        "spark.holdfast.state.dir": str(tmp_path / "durable"),
        "path": str(tmp_path / "shown"),
    }
    del given[left_out]
    with pytest.raises(InvalidArgumentError, match=left_out):
        CsvSource(given).streamWriter(StructType().add("value", "long"), overwrite=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.since("4.1")
@pytest.mark.all
def test_another_query_and_other_columns_are_refused_before_they_are_written(stream: Stream, tmp_path: Path) -> None:
    """On the driver, before tasks put rows into the folder; another query is one with another checkpoint location."""
    stream.run_to(0)
    parts = set(Path(stream.sink.folder).glob("part-*"))
    with pytest.raises(StreamingQueryException, match="another query writes to this sink"):
        stream.run_to(0, stream.writer().option("checkpointLocation", str(tmp_path / "other")))
    with pytest.raises(StreamingQueryException, match="the folder's files have different columns"):
        stream.run_to(99, stream.writer("value | timestamp"))
    assert set(Path(stream.sink.folder).glob("part-*")) == parts


@pytest.mark.since("4.1")
def test_append_mode_only(stream: Stream) -> None:
    """Spark refuses other modes of a Python source: rows that change need exactly_once in foreachBatch."""
    with pytest.raises(StreamingQueryException, match="does not support Update mode"):
        stream.run_to(0, stream.writer().outputMode("update"))


class SecretFolder(CsvFolder):
    credentials = ("password",)


class SecretSource(CsvSource):
    def sink(self) -> sinks.TwoPhaseSink:
        return SecretFolder(self.options["path"])


@pytest.mark.since("4.1")
def test_credentials_do_not_travel_to_the_workers(stream: Stream, tmp_path: Path) -> None:
    """The driver has them from options; workers take theirs from the session or the environment."""
    stream.run_to(0)
    given = {
        "checkpointLocation": str(tmp_path / "query"),
        "spark.holdfast.state.dir": str(tmp_path / "durable"),
        "path": stream.sink.folder,
        "password": "not-to-be-seen",
        "delta.azure_storage_account_key": "not-to-be-seen",
        "delta.AZURE_STORAGE_SAS_TOKEN": "not-to-be-seen",
        "token.endpoint.url": "to-be-seen-too",
        "storage.secret": "not-to-be-seen",
        "delta.azure_storage_connection_string": "not-to-be-seen",
        "delta.azure_storage_sas": "not-to-be-seen",
        "proxy.authorization": "not-to-be-seen",
        "db.passwd": "not-to-be-seen",
        "sasl.mechanism": "also-to-be-seen",
        "place": "here-to-be-seen",
    }
    schema = StructType().add("value", "long").add("twice", "long")
    writer = SecretSource(given).streamWriter(schema, overwrite=False)
    travelling = cloudpickle.dumps(writer)
    assert b"here-to-be-seen" in travelling
    assert b"to-be-seen-too" in travelling
    assert b"also-to-be-seen" in travelling
    assert b"not-to-be-seen" not in travelling
    assert "not-to-be-seen" not in f"{writer!r} {vars(writer)}"


@pytest.mark.since("4.1")
def test_an_old_spark_is_told_the_other_way() -> None:
    with pytest.raises(InvalidArgumentError, match="foreachBatch"):
        spark_versions.require_arrow_streams("4.0.5")
    spark_versions.require_arrow_streams("4.1.0")
