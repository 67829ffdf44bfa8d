"""Exactly-once sinks: each micro-batch becomes visible once, consistent with the query's state.

::

    from holdfast import sinks

    sink = sinks.postgres("totals", table="totals", keys=["user"])
    totals.writeStream.outputMode("update").foreachBatch(sinks.exactly_once(sink)).start()

Workers write and prepare the rows; the driver stores the decision in ``spark.holdfast.state.dir`` before it makes the
rows visible: docs/sinks.md. Servers and credentials are settings, ``spark.holdfast.sink.<name>.<option>``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast.distribution import needs_extra
from holdfast.spark_integration.sink_source import SinkSource, source_options
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.exactly_once import ExactlyOnce, exactly_once
from holdfast.spark_integration.sinks.files.parquet import ParquetSink, parquet_files, read_parquet
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    ReusingSink,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
)

__all__ = [
    "ExactlyOnce",
    "Handle",
    "ReusingSink",
    "SinkAttempt",
    "SinkQuery",
    "SinkSource",
    "SinkTransaction",
    "TwoPhaseSink",
    "delta",
    "exactly_once",
    "kafka",
    "parquet",
    "parquet_files",
    "postgres",
    "read_parquet",
    "source_options",
]


def postgres(
    name: str, table: str, *, keys: Sequence[str] = (), create: bool = False, schema: str | None = None, dsn: str = ""
) -> TwoPhaseSink:
    """Return a sink that writes to a PostgreSQL table; needs ``holdfast-spark[postgres]``.

    Parameters
    ----------
    name : str
        Identifies the sink; one query writes under one name. Its options are ``spark.holdfast.sink.<name>.``, with
        libpq's names: ``host``, ``password``, ``sslmode``.
    table : str
        The table's name in SQL: ``totals``, ``shop.totals``, ``shop."Totals"``.
    keys : sequence of str
        Columns of a unique key: a row replaces the row with the same key. Without keys, rows are appended.
    create : bool
        Create the table if it is missing, with the keys as its primary key.
    schema : str, optional
        The schema of the sink's marks and staging tables; by default the table's.
    dsn : str
        A libpq connection string without credentials. Options take precedence over it.

    Raises
    ------
    InvalidArgumentError
        A parameter is invalid, or the package is not installed.
    """
    with needs_extra("postgres"):
        from holdfast.spark_integration.sinks.postgres.sink import PostgresSink
    return PostgresSink(name, table, keys, create, schema, dsn)


def kafka(name: str, topic: str | None = None, *, servers: str | None = None, timeout_s: float = 30) -> TwoPhaseSink:
    """Return a sink that writes messages to Kafka; needs ``holdfast-spark[kafka]``.

    Parameters
    ----------
    name : str
        Identifies the sink; one query writes under one name. Its options are ``spark.holdfast.sink.<name>.``, with
        librdkafka's names: ``security.protocol``, ``sasl.password``.
    topic : str, optional
        The topic of all messages; without it, rows need a column ``topic``.
    servers : str, optional
        Bootstrap brokers, such as ``host:port,host:port``; the option ``bootstrap.servers`` takes precedence.
    timeout_s : float
        How long to wait for a broker's response, in seconds: 0.001 to 3600.

    Raises
    ------
    InvalidArgumentError
        A parameter is invalid, or the package is not installed.
    """
    with needs_extra("kafka"):
        from holdfast.spark_integration.sinks.kafka.sink import KafkaSink
    return KafkaSink(name, topic, servers=servers, timeout_s=timeout_s)


def delta(
    name: str,
    url: str | os.PathLike[str],
    *,
    keys: Sequence[str] | None = None,
    partition_by: Sequence[str] = (),
    create: bool = False,
    compression: str = "zstd",
    file_mb: int = 128,
) -> TwoPhaseSink:
    """Return a sink that commits once per micro-batch to a Delta table; needs ``holdfast-spark[delta]``.

    Parameters
    ----------
    name : str
        Identifies the sink; one query writes under one name. Its options are ``spark.holdfast.sink.<name>.``, named as
        in ``spark.holdfast.storage.``; those specific to `deltalake` go under ``….delta.``.
    url : str
        The table's URL, without credentials.
    keys : sequence of str, optional
        For update mode: a row replaces the row with the same key. Without keys, rows are appended.
    partition_by : sequence of str
        The table's partition columns.
    create : bool
        Create the table if it is missing, with the columns of the rows.
    compression : {"zstd", "snappy", "gzip", "lz4", "none"}
    file_mb : int
        Approximate file size in MB of uncompressed rows; a task buffers one file in memory.

    Raises
    ------
    InvalidArgumentError
        A parameter is invalid, or a package is missing.
    """
    with needs_extra("delta"):
        import holdfast.spark_integration.sinks.delta.commits  # noqa: F401  fails here, not at the first start
    return DeltaSink(name, os.fspath(url), keys, partition_by, create, compression, file_mb)


def parquet(name: str, url: str | os.PathLike[str], *, compression: str = "zstd", file_mb: int = 128) -> TwoPhaseSink:
    """Return a sink that writes Parquet files; `read_parquet` reads the committed micro-batches.

    Parameters
    ----------
    name : str
        Identifies the sink; one query writes under one name. Its options are ``spark.holdfast.sink.<name>.``, named as
        in ``spark.holdfast.storage.``.
    url : str
        A folder on any storage that holdfast supports, without credentials.
    compression : {"zstd", "snappy", "gzip", "lz4", "none"}
    file_mb : int
        Approximate file size in MB of uncompressed rows; a task buffers one file in memory.

    Raises
    ------
    InvalidArgumentError
        A parameter is invalid.
    """
    return ParquetSink(name, os.fspath(url), compression, file_mb)
