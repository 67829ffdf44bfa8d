"""The formats of holdfast's own sinks, each made from a stream's options; and `register`, for all data sources.

Spark imports this module in a process of its own whenever it looks for a sink's source or makes one, so it imports
nothing that only reads state.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from holdfast.distribution import needs_extra
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.sink_source.source import SinkSource
from holdfast.spark_integration.sinks.delta.sink import DeltaSink
from holdfast.spark_integration.sinks.files.parquet import ParquetSink
from holdfast.spark_integration.sinks.two_phase_sink import TwoPhaseSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FileSink = TypeVar("_FileSink", ParquetSink, DeltaSink)


class _Source(SinkSource):
    def _required(self, option: str) -> str:
        value = self.options.get(option, "")
        if not value:
            raise InvalidArgumentError(f"give the option {option}", format=self.name(), needs=", ".join(self.arguments))
        return value

    def _names(self, option: str) -> list[str]:
        return [name.strip() for name in self.options.get(option, "").split(",") if name.strip()]

    def _flag(self, option: str) -> bool:
        value = self.options.get(option, "false").lower()
        if value not in ("true", "false"):
            raise InvalidArgumentError(f"the option {option} must be true or false", given=value)
        return value == "true"

    def _number(self, option: str, default: int) -> int:
        value = self.options.get(option, str(default))
        if not re.fullmatch("[0-9]{1,9}", value):
            raise InvalidArgumentError(f"the option {option} must be a whole number", given=value)
        return int(value)

    def _seconds(self, option: str, default: float) -> float:
        value = self.options.get(option, str(default))
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
            raise InvalidArgumentError(
                f"the option {option} must be a number of seconds, such as 30 or 0.5", given=value
            )
        return float(value)

    def _with_files(self, sink: _FileSink) -> _FileSink:
        compression = self.options.get("compression", sink.compression)
        return replace(sink, compression=compression, file_mb=self._number("file_mb", sink.file_mb))


class PostgresSource(_Source):
    """``format("holdfast-postgres")``: options ``name``, ``table``, and others of `PostgresSink`."""

    arguments = ("name", "table", "keys", "create", "schema", "dsn")

    @classmethod
    def name(cls) -> str:
        return "holdfast-postgres"

    def sink(self) -> TwoPhaseSink:
        """Return the sink that the options describe."""
        with needs_extra("postgres"):
            from holdfast.spark_integration.sinks.postgres.sink import PostgresSink
        name, table = self._required("name"), self._required("table")
        schema, dsn = self.options.get("schema"), self.options.get("dsn", "")
        return PostgresSink(name, table, self._names("keys"), self._flag("create"), schema, dsn)


class KafkaSource(_Source):
    """``format("holdfast-kafka")``: options ``name``, ``topic``, ``servers`` and ``timeout_s``."""

    arguments = ("name", "topic", "servers", "timeout_s")

    @classmethod
    def name(cls) -> str:
        return "holdfast-kafka"

    def sink(self) -> TwoPhaseSink:
        """Return the sink that the options describe."""
        with needs_extra("kafka"):
            from holdfast.spark_integration.sinks.kafka.sink import KafkaSink
        name, topic, servers = self._required("name"), self.options.get("topic"), self.options.get("servers")
        return KafkaSink(name, topic, servers=servers, timeout_s=self._seconds("timeout_s", 30))


class ParquetSource(_Source):
    """``format("holdfast-parquet")``: options ``name``, ``path``, ``compression`` and ``file_mb``."""

    arguments = ("name", "path", "compression", "file_mb")

    @classmethod
    def name(cls) -> str:
        return "holdfast-parquet"

    def sink(self) -> TwoPhaseSink:
        """Return the sink that the options describe."""
        return self._with_files(ParquetSink(self._required("name"), self._required("path")))


class DeltaSource(_Source):
    """``format("holdfast-delta")``: options ``name``, ``path``, and others of `DeltaSink`."""

    arguments = ("name", "path", "keys", "partitionBy", "create", "compression", "file_mb")

    @classmethod
    def name(cls) -> str:
        return "holdfast-delta"

    def sink(self) -> TwoPhaseSink:
        """Return the sink that the options describe."""
        keys, partitions = self._names("keys") or None, self._names("partitionBy")
        sink = DeltaSink(self._required("name"), self._required("path"), keys, partitions, self._flag("create"))
        return self._with_files(sink)


SINK_SOURCES = (PostgresSource, KafkaSource, ParquetSource, DeltaSource)


def register(spark: SparkSession) -> None:
    """Register ``format("holdfast")`` and the sinks' formats, if Spark has not found them by itself."""
    from holdfast.spark_integration.state_source.reading import register_source
    from holdfast.spark_integration.state_source.source import StateSource

    for source in (StateSource, *SINK_SOURCES):
        register_source(spark, source)
