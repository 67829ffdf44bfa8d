"""Micro-batches into each sink, alternating with the fastest plain way to write the same target.

::

    the same rows ──▶ delta, plain delta ──▶ parquet, plain parquet ──▶ postgres, plain COPY ──▶ …
    and again with `few` rows, which shows the fixed cost of a micro-batch

Rows come from memory, in as many partitions as there are slots. A sink's time covers all of `exactly_once`: the tasks,
the decision and the commit. PostgreSQL and Kafka are measured if a server is given. Delta is also written by two
running queries, by ``foreachBatch`` and as a data source; for these the time is that of Spark's whole trigger.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from holdfast import clock, sinks
from holdfast.benches.instruments.measured import Measured, Places, StoreWatch
from holdfast.benches.instruments.spark import session
from holdfast.benches.jobs.job import StoreJob, option
from holdfast.benches.jobs.rows import keys_of, table_of, values_of
from holdfast.benches.jobs.shard import timed_ms
from holdfast.settings import PREFIX
from holdfast.spark_integration.shard.task import QUERY_PROPERTY

if TYPE_CHECKING:
    import psycopg

Rows = Iterable[pa.RecordBatch]
_NAMES = ("key", "n", "total", "page")
#: Makes the names of sinks unique, since servers keep the progress of sinks of earlier runs.
_RUN = clock.new_id()

# The fastest plain ways: each writes the rows of a ``mapInArrow`` task with the sink's encoders, if any. They prepare
# nothing, so that a crash leaves half a micro-batch: only the guarantee differs.


def _to_parquet(folder: str, batches: Rows) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_batches(batches), Path(folder, f"{clock.new_id()}.parquet"), compression="zstd")


def _to_delta(url: str, batches: Rows) -> None:
    """Append with `deltalake.write_deltalake`: one Delta commit per partition."""
    from deltalake import write_deltalake

    write_deltalake(url, pa.Table.from_batches(batches), mode="append")


def _to_postgres(dsn: str, name: str, by: tuple[str, ...], batches: Rows) -> None:
    """COPY into a table; by key into a temporary table, then ``INSERT … ON CONFLICT``. Keeps the connection."""
    from psycopg import sql

    from holdfast.spark_integration.sinks.postgres.writing import by_key, encoded

    connection, table = _connection(dsn), sql.Identifier(name)
    names = sql.SQL(", ").join(map(sql.Identifier, _NAMES))
    into = sql.Identifier("given") if by else table
    with connection.transaction():
        if by:
            connection.execute(sql.SQL("CREATE TEMPORARY TABLE given (LIKE {}) ON COMMIT DROP").format(table))
        with connection.cursor().copy(sql.SQL("COPY {} ({}) FROM STDIN").format(into, names)) as copy:
            for batch in batches:
                for text in encoded(by_key(batch, list(by)) if by else batch, frozenset()):
                    copy.write(text)
        if by:
            newer = sql.SQL("SET n = excluded.n, total = excluded.total, page = excluded.page")
            upsert = sql.SQL("INSERT INTO {} SELECT * FROM given ON CONFLICT (key) DO UPDATE {}")
            connection.execute(upsert.format(table, newer))


def _to_kafka(servers: str, topic: str, batches: Rows) -> None:
    """Send with an idempotent producer, without a transaction."""
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "delivery.report.only.error": True,
            # Like the sink: saves half a second before the first message.
            "enable.sparse.connections": False,
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    for batch in batches:
        for key, value in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True):
            producer.produce(topic, value, key)
        producer.poll(0)
    if producer.flush(60):
        raise TimeoutError("Kafka did not acknowledge all messages within 60 s")


_connections: dict[str, psycopg.Connection[Any]] = {}


def _connection(dsn: str) -> psycopg.Connection[Any]:
    import psycopg

    found = _connections.get(dsn)
    if found is None or found.closed:
        found = _connections[dsn] = psycopg.connect(dsn, autocommit=True)
    return found


def make_tables(dsn: str) -> None:
    import psycopg

    with psycopg.connect(dsn) as connection:
        for table in ("", "_plain", "_keys", "_plain_keys"):
            key = "PRIMARY KEY" if table.endswith("keys") else "NOT NULL"
            connection.execute(f"DROP TABLE IF EXISTS holdfast_bench{table}")
            connection.execute(
                f"CREATE TABLE holdfast_bench{table} (key text {key}, n bigint, total bigint, page text)"
            )


_MESSAGES = "key", "to_json(struct(n, total, page)) as value"
_COLUMNS = "key string, n long, total long, page string"
_SETTINGS = {
    "spark.master": "local[2]",
    "spark.driver.memory": "4g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
}
_FOLDERS = {"spark.local.dir": "spark", f"{PREFIX}local.dir": "local", f"{PREFIX}state.dir": "decisions"}
#: The suffix of phases that write small micro-batches.
FEW_ROWS = ", few rows"
#: Writes the micro-batch with this id, and returns the time in ms.
Way = Callable[["DataFrame", int], float]


@dataclass(frozen=True)
class Sinks(StoreJob):
    """The same rows through each sink and by plain writes."""

    name = "sinks"

    rows: int = option(100_000, "rows per micro-batch")
    keys: int = option(100_000, "unused")
    few: int = option(100, "rows per small micro-batch")
    batches: int = option(12, "micro-batches into each target")
    warmup: int = option(3, "uncounted micro-batches at the start")
    value_bytes: int = option(92, "bytes of a row without its key")
    partitions: int = option(2, "tasks per micro-batch")
    postgres: str | None = option(None, "libpq connection string without a password; see make postgres")
    kafka: str | None = option(None, "brokers, as host:port; see make kafka")
    topic: str | None = option(None, "Kafka topic")

    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        watch, chance = StoreWatch({"backend": backend_name, **options}, self.warmup), random.Random(7)
        with ExitStack() as stack:
            spark = session(_SETTINGS | {name: str(places.disk / folder) for name, folder in _FOLDERS.items()})
            stack.callback(spark.stop)
            many, few = (_held(spark, rows, self) for rows in (self.rows, self.few))
            ways = _ways(self, places) | stack.enter_context(_queries(spark, many, places.disk))
            for batch in range(self.batches):
                watch.begin()
                for name in chance.sample(sorted(ways), len(ways)):
                    watch.note(name, ways[name](many, 2 * batch), counts=name == "parquet")
                    watch.note(f"{name}{FEW_ROWS}", ways[name](few, 2 * batch + 1))
                watch.look(0)
        return watch.measured({})


def _ways(job: Sinks, places: Places) -> dict[str, Way]:
    """Return each sink and the plain way to write the same kind of target."""
    (places.disk / "plain-parquet").mkdir()
    disk = str(places.disk)
    ways = {
        "parquet": _sink(sinks.parquet("bench-parquet", f"{disk}/parquet"), 1),
        "parquet, plain": _plain(partial(_to_parquet, f"{disk}/plain-parquet")),
        "delta": _sink(sinks.delta("bench-delta", f"{disk}/delta", create=True), 2),
        "delta, plain": _plain(partial(_to_delta, f"{disk}/plain-delta")),
    }
    if job.postgres is not None:
        make_tables(job.postgres)
        ways |= {
            "postgres": _sink(sinks.postgres(f"bench-copy-{_RUN}", "holdfast_bench", dsn=job.postgres), 3),
            "postgres, plain": _plain(partial(_to_postgres, job.postgres, "holdfast_bench_plain", ())),
            "postgres by key": _sink(
                sinks.postgres(f"bench-keys-{_RUN}", "holdfast_bench_keys", keys=["key"], dsn=job.postgres), 4
            ),
            "postgres by key, plain": _plain(
                partial(_to_postgres, job.postgres, "holdfast_bench_plain_keys", ("key",))
            ),
        }
    if job.kafka is not None and job.topic is not None:
        ways |= {
            "kafka": _sink(sinks.kafka(f"bench-kafka-{_RUN}", job.topic, servers=job.kafka), 5, *_MESSAGES),
            "kafka, plain": _plain(partial(_to_kafka, job.kafka, job.topic), *_MESSAGES),
        }
    return ways


def _sink(sink: sinks.TwoPhaseSink, number: int, *columns: str) -> Way:
    write = sinks.exactly_once(sink)

    def way(frame: DataFrame, batch_id: int) -> float:
        # Spark sets this property inside a query.
        frame.sparkSession.sparkContext.setLocalProperty(QUERY_PROPERTY, f"00000000-0000-4000-8000-{number:012d}")
        rows = frame.selectExpr(*columns) if columns else frame
        return timed_ms(partial(write, rows, batch_id))

    return way


def _plain(write: Callable[[Rows], None], *columns: str) -> Way:
    def task(batches: Rows) -> Iterator[pa.RecordBatch]:
        write(batches)
        return iter(())

    def way(frame: DataFrame, _batch_id: int) -> float:
        rows = frame.selectExpr(*columns) if columns else frame
        return timed_ms(rows.mapInArrow(task, "rows long").collect)

    return way


@contextmanager
def _queries(spark: SparkSession, example: DataFrame, disk: Path) -> Iterator[dict[str, Way]]:
    """Yield both ways to write a Delta table from a query, while their queries run."""
    sink = {name: sinks.delta(f"bench-{name}", f"{disk}/{name}", create=True) for name in ("query", "source")}

    def as_function(writer: DataStreamWriter) -> DataStreamWriter:
        return writer.foreachBatch(sinks.exactly_once(sink["query"]))

    def as_source(writer: DataStreamWriter) -> DataStreamWriter:
        options = sinks.source_options(spark, sink["source"])
        given = {"name": "bench-source", "path": f"{disk}/source", "create": "true"}
        return writer.format("holdfast-delta").options(**options).options(**given)

    with ExitStack() as stack:
        ways: dict[str, Way] = {}
        reader = spark.readStream.schema(example.schema).option("recursiveFileLookup", "true")
        for name, into in {"delta, in a query": as_function, "delta, as a data source": as_source}.items():
            place = disk / name.replace(", ", "-").replace(" ", "-")
            (place / "input").mkdir(parents=True)
            rows = reader.parquet(str(place / "input"))
            query = into(rows.writeStream).option("checkpointLocation", str(place / "location")).start()
            stack.callback(query.stop)
            ways[name] = partial(_write, query, place / "input", disk / "kept")
        yield ways


def _write(query: StreamingQuery, folder: Path, kept: Path, rows: DataFrame, batch_id: int) -> float:
    """Feed rows as the next micro-batch to a query that reads a folder."""
    files = kept / str(rows.count())
    if not files.exists():
        rows.write.parquet(str(files))
    ready = folder.with_name("ready")
    ready.mkdir(exist_ok=True)
    for number, path in enumerate(sorted(files.glob("*.parquet"))):
        # In a folder that is renamed into place, so that a micro-batch finds all files.
        (ready / f"{batch_id:06}-{number}.parquet").hardlink_to(path)
    ready.rename(folder / f"{batch_id:06}")
    query.processAllAvailable()
    progress = [each for each in query.recentProgress if each["numInputRows"]]
    return float(progress[-1]["durationMs"]["triggerExecution"])


def _held(spark: SparkSession, rows: int, job: Sinks) -> DataFrame:
    """Return rows cached in memory."""

    def made(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = table_of(job.value_bytes)
        for batch in batches:
            numbers = batch.column(0).to_numpy()
            keys = keys_of(table, numbers).columns
            values = values_of(table, len(numbers), job.value_bytes, np.random.default_rng(int(numbers[0])))
            columns = [column.cast(pa.string()) if column.type == pa.large_string() else column for column in values]
            yield pa.record_batch([keys.column(0).cast(pa.string()), *columns], ["key", *values.schema.names])

    frame = spark.range(rows, numPartitions=2).mapInArrow(made, _COLUMNS).repartition(job.partitions).cache()
    frame.count()
    return frame
