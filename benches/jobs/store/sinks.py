"""Micro-batches into each sink, in turns with the fastest plain way into the same target.

::

    the same rows ──▶ delta, plain delta ──▶ parquet, plain parquet ──▶ postgres, plain COPY ──▶ …
    and again, in another order, with `few` rows: what a micro-batch costs besides its rows

Rows come from memory, in as many partitions as there are slots; a sink's time has all of `exactly_once`: the tasks,
the decision and the commit. PostgreSQL and Kafka are measured where a server is named. Delta is also written by two
queries that run, one by each way in (`sink_queries`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import click

from holdfast import sinks
from holdfast.benches.instruments.measured import Measured, Places
from holdfast.benches.instruments.store_watch import StoreWatch
from holdfast.benches.jobs.job import StoreJob, option
from holdfast.benches.jobs.store import plain_writes, sink_queries
from holdfast.benches.jobs.store.savepoints import rows_of, session
from holdfast.benches.jobs.store.snapshots import timed_ms
from holdfast.settings import PREFIX
from holdfast.spark_integration.shard.streaming_task import QUERY_PROPERTY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MESSAGES = "key", "to_json(struct(n, total, page)) as value"


@dataclass(frozen=True)
class Sinks(StoreJob):
    """See the module."""

    name = "sinks"

    rows: int = option(100_000, "rows of a micro-batch")
    keys: int = option(100_000, "the same")
    few: int = option(100, "rows of a small micro-batch")
    batches: int = option(12, "micro-batches into each target")
    warmup: int = option(3, "first of these, which are not counted")
    memory_mb: int | None = option(None, "not used", click.IntRange(1))
    value_bytes: int = option(92, "bytes of a row besides its key")
    partitions: int = option(2, "tasks of a micro-batch")
    postgres: str | None = option(None, "a libpq connection string without a password; see make postgres")
    kafka: str | None = option(None, "brokers, as host:port; see make kafka")
    topic: str | None = option(None, "a topic there")

    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        """Write micro-batches in all ways, by turns."""
        phases_ms, watch, chance = [], StoreWatch(), random.Random(7)
        with session(places) as spark, ExitStack() as stack:
            spark.conf.set(f"{PREFIX}state.dir", str(places.disk / "decisions"))
            many, few = (_held(spark, rows, self) for rows in (self.rows, self.few))
            ways = _ways(self, places)
            queries = stack.enter_context(sink_queries.running(spark, many, places.disk))
            for batch in range(self.batches):
                if batch == self.warmup:
                    watch.count_from_here()
                phases = {}
                for name in chance.sample(sorted(ways), len(ways)):
                    way = ways[name]
                    phases[name] = timed_ms(partial(way, many, 2 * batch))
                    phases[f"{name}, few rows"] = timed_ms(partial(way, few, 2 * batch + 1))
                for name in chance.sample(sorted(queries), len(queries)):
                    phases[name], phases[f"{name}, few rows"] = queries[name](many), queries[name](few)
                phases_ms.append({name: phases[name] for name in sorted(phases)})
                watch.look(0)
        first = [phases["parquet"] for phases in phases_ms]
        return watch.measured(phases_ms, first, {"backend": backend_name, **options})


Way = Callable[["DataFrame", int], None]


def _ways(job: Sinks, places: Places) -> dict[str, Way]:
    """Return each sink, and the plain way into the same kind of target."""
    (places.disk / "plain-parquet").mkdir()
    disk = str(places.disk)
    ways = {
        "parquet": _sink(sinks.parquet("bench-parquet", f"{disk}/parquet"), 1),
        "parquet, plain": _plain(plain_writes.PlainParquet(f"{disk}/plain-parquet")),
        "delta": _sink(sinks.delta("bench-delta", f"{disk}/delta", create=True), 2),
        "delta, plain": _plain(plain_writes.PlainDelta(f"{disk}/plain-delta")),
    }
    if job.postgres is not None:
        _make_tables(job.postgres)
        ways |= {
            "postgres": _sink(sinks.postgres("bench-copy", "holdfast_bench", dsn=job.postgres), 3),
            "postgres, plain": _plain(plain_writes.PlainCopy(job.postgres, "holdfast_bench_plain")),
            "postgres by key": _sink(
                sinks.postgres("bench-keys", "holdfast_bench_keys", keys=["key"], dsn=job.postgres), 4
            ),
            "postgres by key (4 connections)": _sink(
                sinks.postgres(
                    "bench-parts", "holdfast_bench_parts_keys", keys=["key"], dsn=job.postgres, connections=4
                ),
                6,
            ),
            "postgres by key, plain": _plain(plain_writes.PlainUpsert(job.postgres, "holdfast_bench_plain_keys")),
        }
    if job.kafka is not None and job.topic is not None:
        ways |= {
            "kafka": _sink(sinks.kafka("bench-kafka", job.topic, servers=job.kafka), 5, *_MESSAGES),
            "kafka, plain": _plain(plain_writes.PlainKafka(job.kafka, job.topic), *_MESSAGES),
        }
    return ways


def _sink(sink: sinks.TwoPhaseSink, number: int, *columns: str) -> Way:
    write = sinks.exactly_once(sink)

    def way(frame: DataFrame, batch_id: int) -> None:
        # What Spark tells the function inside a query.
        frame.sparkSession.sparkContext.setLocalProperty(QUERY_PROPERTY, f"00000000-0000-4000-8000-{number:012d}")
        write(frame.selectExpr(*columns) if columns else frame, batch_id)

    return way


def _plain(task: plain_writes.Task, *columns: str) -> Way:
    def way(frame: DataFrame, _batch_id: int) -> None:
        (frame.selectExpr(*columns) if columns else frame).mapInArrow(task, "rows long").collect()

    return way


def _held(spark: SparkSession, rows: int, job: Sinks) -> DataFrame:
    """Return rows that are in memory."""
    frame = rows_of(spark, rows, job.value_bytes).repartition(job.partitions).cache()
    frame.count()
    return frame


def _make_tables(dsn: str) -> None:
    import psycopg

    with psycopg.connect(dsn) as connection:
        for table in ("", "_plain", "_keys", "_parts_keys", "_plain_keys"):
            key = "PRIMARY KEY" if table.endswith("keys") else "NOT NULL"
            connection.execute(f"DROP TABLE IF EXISTS holdfast_bench{table}")
            connection.execute(
                f"CREATE TABLE holdfast_bench{table} (key text {key}, n bigint, total bigint, page text)"
            )
