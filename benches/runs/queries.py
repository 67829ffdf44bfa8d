"""The queries that engines run: one job, with its state kept in different ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState

import holdfast
from holdfast.backends.run import TableSchema
from holdfast.benches.jobs.by_key import ByProcessor, DropIn, one_key
from holdfast.benches.jobs.job import SparkJob

#: The name of the operator in every query of holdfast.
OPERATOR = "bench"


def with_state(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return the job on holdfast."""
    grouped = holdfast.stream(frame).groupBy("key")
    return grouped.applyInArrowWithState(job.stateful, job.output, job.state, "update", name=OPERATOR)


def without_state(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return holdfast's pipeline around a function that keeps no state."""
    grouped = holdfast.stream(frame).groupBy("key")
    return grouped.applyInArrowWithState(job.stateless, job.output, job.state, "update", name=OPERATOR)


def spark_aggregation(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return the job as Spark's own aggregation."""
    return frame.groupBy("key").agg(*job.aggregates())


def by_key(frame: DataFrame, job: DropIn) -> DataFrame:
    """Return a job by key on holdfast."""
    grouped = holdfast.stream(frame).groupBy("key")
    return grouped.applyInPandasWithState(one_key, job.output, job.state, "update", "NoTimeout", name=OPERATOR)


def spark_by_key(frame: DataFrame, job: DropIn) -> DataFrame:
    """Return a job by key as Spark's own ``applyInPandasWithState``."""
    return frame.groupBy("key").applyInPandasWithState(one_key, job.output, job.state, "update", "NoTimeout")


def by_processor(frame: DataFrame, job: ByProcessor, *, in_pandas: bool) -> DataFrame:
    """Return a job by processor on holdfast."""
    grouped, processor = holdfast.stream(frame).groupBy("key"), job.processor(in_pandas=in_pandas)
    method = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
    return method(processor, job.output, "update", "None", name=OPERATOR)


def spark_by_processor(frame: DataFrame, job: ByProcessor, *, in_pandas: bool) -> DataFrame:
    """Return a job by processor as Spark's own ``transformWithState``."""
    grouped, processor = frame.groupBy("key"), job.processor(in_pandas=in_pandas)
    method = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
    return method(processor, job.output, "update", "None")


def _count(_key: tuple[object, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    rows = sum(len(chunk) for chunk in chunks)
    before = state.get[0] if state.exists else 0
    state.update((before + rows,))
    yield pd.DataFrame({"n": [before + rows]})


def spark_counting(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return Spark's ``applyInPandasWithState`` doing next to nothing: as many keys as partitions, counted."""
    route = F.pmod(F.xxhash64("key"), F.lit(job.partitions)).cast("int")
    few = frame.select(route.alias("route"), *[name for name in frame.columns if name != "key"])
    return few.groupBy("route").applyInPandasWithState(_count, "n long", "n long", "update", "NoTimeout")


def live_bytes(local_dir: Path, backend_name: str, job: SparkJob) -> int:
    """Return the Arrow size of the newest version of all shards of `with_state`, whose Spark still runs.

    `local_dir` is its ``spark.holdfast.local.dir``; counted are key and value columns of live keys.
    """
    from pyspark.sql.types import StructType

    from holdfast import clock
    from holdfast.backends.registry import find_backend
    from holdfast.spark_integration.shard.operator import STATE_TABLE
    from holdfast.spark_integration.spark_types import arrow_schema, parse_struct

    key = arrow_schema(StructType(parse_struct(job.output, "output").fields[:1]), "the key")
    table = TableSchema.of(STATE_TABLE, key, arrow_schema(parse_struct(job.state, "state"), "state"))
    total = 0
    for directory in local_dir.glob("holdfast-*/executor-*/**/shard-*"):
        with find_backend(backend_name)(directory, {STATE_TABLE: table}, clock.new_id) as backend:
            for pointer in backend.versions()[-1:]:
                with backend.view(pointer) as view:
                    total += sum(run.keys.nbytes + run.values.nbytes for run in view.scan(STATE_TABLE))
    return total
