"""The sinks that are killed: how each is made, where its rows come from, and how its server dies.

An entry is used by the driver that is killed and by the test that kills it; what both must know of a target travels as
its `Place`. Readers are those of other people: they know nothing of holdfast.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.dataset as ds

from holdfast import sinks
from holdfast.examples.sinks import csv_folder
from tests.servers import downloads

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming import DataStreamWriter

    from holdfast.sinks import TwoPhaseSink

Place = dict[str, str]
_TYPES = {"key": "int64", "batch": "int64", "n": "int64", "total": "int64", "part": "int32", "run": "string"}
_SQL = {"int64": "bigint", "int32": "integer"}
SCHEMA = pa.schema([*_TYPES.items(), ("attempt", "string")])
#: A key is always in the same partition.
_KEYS = ["part", "key"]


class Target:
    """One sink and its target."""

    #: The sink's.
    name: str
    upserts = False
    has_server = False
    #: Whether Spark's own sink only appends.
    appends_only = False

    @contextmanager
    def served(self, folder: Path) -> Iterator[Place]:
        yield {"folder": str(folder / "target")}

    def sink(self, place: Place) -> TwoPhaseSink:
        raise NotImplementedError

    def source(self, place: Place) -> tuple[str, Mapping[str, str]] | None:
        """Return the format and the options by which the same sink is a data source, if it appends."""
        return None

    def options(self, place: Place) -> Mapping[str, str]:
        return {}

    def jars(self) -> list[str]:
        """Return what Spark needs for the plain way."""
        return []

    def shape(self, rows: DataFrame) -> DataFrame:
        """Return the rows as the sink takes them."""
        return rows

    def written(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return a task's rows as `shape` makes them."""
        return rows

    def anew(self, place: Place, folder: Path) -> Place:
        """Return another empty target, on the same server if it has one."""
        return {"folder": str(folder / "target")}

    def plain_writer(self, rows: DataFrame, place: Place) -> DataStreamWriter | None:
        """Return Spark's own sink, if that is the plain way; it decides whether rows may be updates."""
        return None

    def plain(self, rows: DataFrame, place: Place) -> None:
        """Write the rows of a micro-batch as is done without such a sink."""
        raise NotImplementedError

    def read(self, place: Place) -> pa.Table:
        raise NotImplementedError

    def kill_server(self) -> None:
        """Kill the target's server; `start_server` starts it again."""

    def start_server(self) -> None:
        """Start it on what it has stored."""


class CsvTarget(Target):
    """The example of a sink of one's own."""

    name = "csv"

    def sink(self, place: Place) -> TwoPhaseSink:
        return csv_folder.CsvFolder(place["folder"])

    def plain(self, rows: DataFrame, place: Place) -> None:
        rows.write.mode("append").parquet(place["folder"])

    def read(self, place: Place) -> pa.Table:
        if list(Path(place["folder"]).glob("*.parquet")):
            return ds.dataset(place["folder"], format="parquet", exclude_invalid_files=True).to_table()
        return csv_folder.read(place["folder"], SCHEMA)


class ParquetTarget(Target):
    name = "files"

    def sink(self, place: Place) -> TwoPhaseSink:
        return sinks.parquet(self.name, place["folder"])

    def source(self, place: Place) -> tuple[str, Mapping[str, str]] | None:
        return "holdfast-parquet", {"path": place["folder"]}

    def plain(self, rows: DataFrame, place: Place) -> None:
        rows.write.mode("append").parquet(place["folder"])

    def read(self, place: Place) -> pa.Table:
        if not list(Path(place["folder"]).glob("_SUCCESS")):
            return sinks.read_parquet(place["folder"])
        return ds.dataset(place["folder"], format="parquet").to_table()


class SparksFiles(Target):
    """Spark's own file sink: it lists what counts in ``_spark_metadata``, which Spark's reader knows and no other."""

    name = "sparks-files"
    appends_only = True

    def plain_writer(self, rows: DataFrame, place: Place) -> DataStreamWriter:
        return rows.writeStream.format("parquet").option("path", place["folder"])

    def read(self, place: Place) -> pa.Table:
        """Read all files, as DuckDB, Polars, pandas and Hive do."""
        return ds.dataset(place["folder"], format="parquet", exclude_invalid_files=True).to_table()

    def read_by_spark(self, spark: SparkSession, place: Place) -> pa.Table:
        return spark.read.parquet(place["folder"]).toArrow().cast(SCHEMA)


class DeltaTarget(Target):
    """A table; `deltalake` reads it."""

    name = "table"

    def __init__(self, *, upserts: bool = False) -> None:
        self.upserts = upserts

    def sink(self, place: Place) -> TwoPhaseSink:
        from holdfast.spark_integration.sinks.delta.sink import DeltaSink

        return DeltaSink(self.name, place["folder"], _KEYS if self.upserts else None, create=True)

    def source(self, place: Place) -> tuple[str, Mapping[str, str]] | None:
        return None if self.upserts else ("holdfast-delta", {"path": place["folder"], "create": "true"})

    def plain(self, rows: DataFrame, place: Place) -> None:
        import deltalake

        deltalake.write_deltalake(place["folder"], rows.toArrow(), mode="append")

    def read(self, place: Place) -> pa.Table:
        import deltalake

        return deltalake.DeltaTable(place["folder"]).to_pyarrow_table()


class PostgresTarget(Target):
    """A table; psycopg reads it."""

    name = "rows"
    has_server = True

    def __init__(self, *, upserts: bool = False, prepares: bool = True) -> None:
        self.upserts, self._prepares = upserts, prepares

    @contextmanager
    def served(self, folder: Path) -> Iterator[Place]:
        from tests.servers.postgres import postgres

        columns = ", ".join(
            f"{name} {_SQL.get(kind, 'text')}" for name, kind in [*_TYPES.items(), ("attempt", "string")]
        )
        key = f", PRIMARY KEY ({', '.join(_KEYS)})" if self.upserts else ""
        self._table = f"CREATE TABLE results ({columns}{key})"
        with postgres(settings={"max_prepared_transactions": 64 if self._prepares else 0}) as self._server:
            with self._server.connect() as connection:
                connection.execute(self._table)  # type: ignore[arg-type]
            yield dict(self._server.options)

    def anew(self, place: Place, folder: Path) -> Place:
        there = {**place, "dbname": f"d{secrets.token_hex(6)}"}
        with self._server.connect() as connection:
            connection.execute(f"CREATE DATABASE {there['dbname']} STRATEGY file_copy")  # type: ignore[arg-type]
        with self._server.connect(**there) as connection:
            connection.execute(self._table)  # type: ignore[arg-type]
        return there

    def sink(self, place: Place) -> TwoPhaseSink:
        return sinks.postgres(self.name, "results", keys=_KEYS if self.upserts else [])

    def source(self, place: Place) -> tuple[str, Mapping[str, str]] | None:
        return None if self.upserts else ("holdfast-postgres", {"table": "results"})

    def options(self, place: Place) -> Mapping[str, str]:
        return place

    def plain(self, rows: DataFrame, place: Place) -> None:
        """Insert the rows of each partition in one transaction, as Spark's JDBC writer does; or upsert them."""
        sets = ", ".join(f"{name} = EXCLUDED.{name}" for name in SCHEMA.names)
        conflict = f"ON CONFLICT ({', '.join(_KEYS)}) DO UPDATE SET {sets}" if self.upserts else ""
        insert = f"INSERT INTO results VALUES ({', '.join(['%s'] * len(SCHEMA))}) {conflict}"

        def insert_all(partition: Iterator[Row]) -> None:
            import psycopg

            with psycopg.connect(**place) as connection, connection.cursor() as cursor:  # type: ignore[arg-type]
                cursor.executemany(insert, [tuple(row) for row in partition])  # type: ignore[arg-type]

        rows.foreachPartition(insert_all)

    def read(self, place: Place) -> pa.Table:
        with self._server.connect(**place) as connection:
            rows = connection.execute("SELECT * FROM results").fetchall()
        columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
        return pa.table([pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)], SCHEMA)

    def kill_server(self) -> None:
        self._server.kill()

    def start_server(self) -> None:
        self._server.start()


class KafkaTarget(Target):
    """A topic; a consumer reads it that sees committed messages only."""

    name = "messages"
    has_server = True

    @contextmanager
    def served(self, folder: Path) -> Iterator[Place]:
        from holdfast.spark_integration.java import ensure_java
        from tests.servers.kafka import kafka

        (folder / "kafka").mkdir()
        with kafka(folder / "kafka", ensure_java()) as self._server:
            yield {"servers": self._server.servers, "topic": self._server.add_topic(3)}

    def sink(self, place: Place) -> TwoPhaseSink:
        return sinks.kafka(self.name, place["topic"], servers=place["servers"], timeout_s=20)

    def source(self, place: Place) -> tuple[str, Mapping[str, str]] | None:
        return "holdfast-kafka", place

    def shape(self, rows: DataFrame) -> DataFrame:
        return rows.selectExpr("CAST(key AS STRING) AS key", "to_json(struct(*)) AS value")

    def written(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        values = [json.dumps(row) for row in rows.to_pylist()]
        return pa.record_batch({"key": rows["key"].cast(pa.string()), "value": pa.array(values, pa.string())})

    def anew(self, place: Place, folder: Path) -> Place:
        return {**place, "topic": self._server.add_topic(3)}

    def jars(self) -> list[str]:
        return downloads.spark_kafka()

    def plain_writer(self, rows: DataFrame, place: Place) -> DataStreamWriter:
        writer = rows.writeStream.format("kafka").option("kafka.bootstrap.servers", place["servers"])
        return writer.option("topic", place["topic"])

    def read(self, place: Place) -> pa.Table:
        from tests.read_kafka import committed

        messages = committed(self._server, place["topic"])
        return pa.Table.from_pylist([json.loads(one.value() or b"") for one in messages], SCHEMA)

    def kill_server(self) -> None:
        self._server.broker.kill()

    def start_server(self) -> None:
        self._server.start()


TARGETS: dict[str, Target] = {
    "csv": CsvTarget(),
    "parquet": ParquetTarget(),
    "delta": DeltaTarget(),
    "delta upsert": DeltaTarget(upserts=True),
    "postgres": PostgresTarget(),
    "postgres staged": PostgresTarget(prepares=False),
    "postgres upsert": PostgresTarget(upserts=True),
    "kafka": KafkaTarget(),
}
#: How others write, where that is no sink of `TARGETS`.
OTHERS: dict[str, Target] = {"Spark's files": SparksFiles()}


def target_of(name: str) -> Target:
    return {**TARGETS, **OTHERS}[name]
