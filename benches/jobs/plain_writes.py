"""The fastest plain ways into the targets of sinks: nothing is prepared, and a crash leaves half a micro-batch.

Each runs where a sink's tasks run, in a task of ``mapInArrow``, and uses the same encoders where there are any. So what
differs is the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast import clock

if TYPE_CHECKING:
    import psycopg

Rows = Iterable[pa.RecordBatch]
Task = Callable[[Rows], Iterator[pa.RecordBatch]]
_WRITTEN = pa.schema({"rows": pa.int64()})


def _written(rows: int) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"rows": [rows]}, _WRITTEN)


@dataclass(frozen=True)
class PlainParquet:
    """A Parquet file for each task."""

    folder: str

    def __call__(self, batches: Rows) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        table = pa.Table.from_batches(batches)
        pq.write_table(table, Path(self.folder, f"{clock.new_id()}.parquet"), compression="zstd")
        return _written(table.num_rows)


@dataclass(frozen=True)
class PlainDelta:
    """`deltalake.write_deltalake` in each task: a Delta commit for each partition."""

    url: str

    def __call__(self, batches: Rows) -> Iterator[pa.RecordBatch]:
        from deltalake import write_deltalake

        table = pa.Table.from_batches(batches)
        write_deltalake(self.url, table, mode="append")
        return _written(table.num_rows)


@dataclass(frozen=True)
class PlainCopy:
    """COPY into the table, committed by each task; the connection is kept, as the sink keeps its own."""

    dsn: str
    table: str

    def __call__(self, batches: Rows) -> Iterator[pa.RecordBatch]:
        from psycopg import sql

        connection = _connection(self.dsn)
        names = sql.SQL(", ").join(map(sql.Identifier, ("key", "n", "total", "page")))
        statement = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(self.table), names)
        with connection.transaction(), connection.cursor().copy(statement) as copy:
            return _written(_copied(copy, batches))


@dataclass(frozen=True)
class PlainUpsert:
    """COPY into a temporary table in the order of keys, then ``INSERT … ON CONFLICT``, committed by each task."""

    dsn: str
    table: str

    def __call__(self, batches: Rows) -> Iterator[pa.RecordBatch]:
        from psycopg import sql

        from holdfast.spark_integration.sinks.postgres.writing import by_key

        connection, table = _connection(self.dsn), sql.Identifier(self.table)
        with connection.transaction():
            connection.execute(
                sql.SQL("CREATE TEMPORARY TABLE given (LIKE {}) ON COMMIT DROP").format(table),
            )
            with connection.cursor().copy("COPY given (key, n, total, page) FROM STDIN") as copy:
                count = _copied(copy, (by_key(batch, ["key"]) for batch in batches))
            connection.execute(
                sql.SQL(
                    "INSERT INTO {} SELECT * FROM given ON CONFLICT (key) DO UPDATE "
                    "SET n = excluded.n, total = excluded.total, page = excluded.page"
                ).format(table)
            )
        return _written(count)


def _copied(copy: psycopg.Copy, batches: Rows) -> int:
    """Send rows as the sink does, and return how many they were."""
    from holdfast.spark_integration.sinks.postgres.writing import encoded

    count = 0
    for batch in batches:
        count += batch.num_rows
        for text in encoded(batch, frozenset()):
            copy.write(text)
    return count


@dataclass(frozen=True)
class PlainKafka:
    """An idempotent producer, without a transaction, in each task."""

    servers: str
    topic: str

    def __call__(self, batches: Rows) -> Iterator[pa.RecordBatch]:
        import confluent_kafka

        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.servers,
                "enable.idempotence": True,
                "delivery.report.only.error": True,
                # As the sink: half a second less until the first message.
                "enable.sparse.connections": False,
                "linger.ms": 5,
                "queue.buffering.max.messages": 1_000_000,
            }
        )
        count = 0
        for batch in batches:
            count += batch.num_rows
            for key, value in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True):
                producer.produce(self.topic, value, key)
            producer.poll(0)
        if producer.flush(60):
            raise TimeoutError("messages were not acknowledged")
        return _written(count)


_connections: dict[str, psycopg.Connection[Any]] = {}


def _connection(dsn: str) -> psycopg.Connection[Any]:
    import psycopg

    found = _connections.get(dsn)
    if found is None or found.closed:
        found = _connections[dsn] = psycopg.connect(dsn, autocommit=True)
    return found


def make_tables(dsn: str) -> None:
    """Make the tables that the sinks and the plain ways write to."""
    import psycopg

    with psycopg.connect(dsn) as connection:
        for table in ("", "_plain", "_keys", "_plain_keys"):
            key = "PRIMARY KEY" if table.endswith("keys") else "NOT NULL"
            connection.execute(f"DROP TABLE IF EXISTS holdfast_bench{table}")
            connection.execute(
                f"CREATE TABLE holdfast_bench{table} (key text {key}, n bigint, total bigint, page text)"
            )
