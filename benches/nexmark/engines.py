"""The engines that run queries of Nexmark: each way to write them on each backend, and on Spark's own state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.benches.jobs.job import StreamingJob
from holdfast.benches.nexmark.job import Nexmark
from holdfast.benches.runs.engines import SPARK_ROCKSDB, SPARK_ROCKSDB_BUDGET, HoldfastEngine, SparkEngine

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from holdfast.benches.instruments.measured import Places

_ROCKSDB_BUDGET = {"spark.holdfast.rocksdb.memory": "{mb}m"}


@dataclass(frozen=True)
class NexmarkEngine(HoldfastEngine):
    """A query on holdfast."""

    runs = Nexmark

    def output_mode(self, job: StreamingJob) -> str:
        assert isinstance(job, Nexmark)
        return job.asked.mode

    def live_bytes(self, job: StreamingJob, places: Places) -> int | None:
        return None  # timers are state too


@dataclass(frozen=True)
class NexmarkOnSpark(SparkEngine):
    """A query on Spark's own state."""

    runs = Nexmark

    def output_mode(self, job: StreamingJob) -> str:
        assert isinstance(job, Nexmark)
        return job.asked.mode_of_spark


@dataclass(frozen=True)
class NexmarkByKeyOnSpark(NexmarkOnSpark):
    """A query by the processor that holdfast runs, in Spark's own operator."""

    def output_mode(self, job: StreamingJob) -> str:
        assert isinstance(job, Nexmark)
        return job.asked.mode


def _of_shards(events: DataFrame, job: Nexmark) -> DataFrame:
    return job.asked.of_shards(events)


def _by_key(events: DataFrame, job: Nexmark) -> DataFrame:
    return job.asked.by_key(events)


def _on_spark(events: DataFrame, job: Nexmark) -> DataFrame:
    return job.asked.of_spark(events)


def _by_key_on_spark(events: DataFrame, job: Nexmark) -> DataFrame:
    return job.asked.by_key_on_spark(events)


def _on_backend(backend: str, way: str, query: Callable[[DataFrame, Any], DataFrame]) -> NexmarkEngine:
    return NexmarkEngine(
        f"nexmark-{backend}{way}",
        query,
        SPARK_ROCKSDB,  # for the pointers, which processors need, and for Spark's own aggregation behind an operator
        _ROCKSDB_BUDGET if backend == "rocksdb" else {},
        backend=backend,
        in_memory=backend == "memory",
    )


ENGINES = {
    engine.name: engine
    for engine in (
        *(_on_backend(backend, "", _of_shards) for backend in ("memory", "filesystem", "rocksdb")),
        *(_on_backend(backend, "-by-key", _by_key) for backend in ("memory", "filesystem", "rocksdb")),
        NexmarkOnSpark("nexmark-spark", _on_spark, SPARK_ROCKSDB, SPARK_ROCKSDB_BUDGET),
        NexmarkByKeyOnSpark("nexmark-spark-by-key", _by_key_on_spark, SPARK_ROCKSDB, SPARK_ROCKSDB_BUDGET),
    )
}
