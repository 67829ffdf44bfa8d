"""The engines that run queries of Nexmark: each way to write them on each backend, and on Spark's own state."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame

from holdfast.benches.nexmark.job import Nexmark
from holdfast.benches.nexmark.query import Query
from holdfast.benches.runs.engines import BACKENDS, SPARK_ROCKSDB, SparkEngine


def _engine(
    name: str,
    way: Callable[[Query, DataFrame], DataFrame],
    backend: str = "",
    mode: Callable[[Nexmark], str] = lambda job: job.asked.mode,
) -> SparkEngine:
    # Spark's store has the pointers, which processors need, and the aggregation that stands behind some operators.
    return SparkEngine(
        f"nexmark-{name}",
        lambda events, job: way(job.asked, events),
        Nexmark,
        backend,
        SPARK_ROCKSDB,
        output_mode=mode,
    )


ENGINES = {
    engine.name: engine
    for engine in (
        *(_engine(backend, Query.of_shards, backend) for backend in BACKENDS),
        *(_engine(f"{backend}-by-key", Query.by_key, backend) for backend in BACKENDS),
        _engine("spark", Query.of_spark, mode=lambda job: job.asked.mode_of_spark),
        _engine("spark-by-key", Query.by_key_on_spark),
    )
}
