"""The queries that engines run: one job, with its state kept in different ways."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow as pa

from holdfast.backends.base import Backend
from holdfast.backends.run import TableSchema
from holdfast.benches.jobs.by_key import JobByKey
from holdfast.benches.jobs.by_processor import ByProcessor
from holdfast.benches.jobs.job import SparkJob
from holdfast.mvcc import Transaction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

    from holdfast.backends.column_names import ColumnChanges
    from holdfast.snapshotter.ownership.stored_tables import StoredTables
    from holdfast.spark_integration.hosts.host import Host
    from holdfast.spark_integration.shard.operator import ShardInput

#: The name of the operator in every query of holdfast.
OPERATOR = "bench"


def with_state(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return the job on holdfast."""
    from holdfast.spark_integration.stream import stream
    from holdfast.spark_integration.vectorised.state_table import StateTable

    state, grouped = StateTable(job.state, job.ttl_ms), stream(frame).groupBy("key")
    return grouped.applyInArrowWithState(
        job.stateful, job.output, state, "update", name=OPERATOR, timeMode=job.time_mode
    )


def without_state(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return holdfast's pipeline around a function that keeps no state."""
    from holdfast.spark_integration.stream import stream

    grouped = stream(frame).groupBy("key")
    return grouped.applyInArrowWithState(job.stateless, job.output, job.state, "update", name=OPERATOR)


@dataclass(frozen=True)
class _Idle:
    """A `ShardFunction` that neither keeps nor returns anything."""

    def tables(self) -> dict[str, TableSchema]:
        return {}

    def changes(self) -> dict[str, ColumnChanges]:
        return {}

    def configuration(self) -> dict[str, str]:
        return {}

    def require_restartable(self, stored: StoredTables, configuration: Mapping[str, str]) -> None:
        """Accept whatever is stored: nothing is."""

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        yield from ()
        return None


def in_group_state(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return holdfast's pipeline around nothing, in ``applyInPandasWithState``."""
    from holdfast.spark_integration.hosts.group_state import GroupStateHost

    return _idle(frame, job, GroupStateHost("update", "NoTimeout"))


def in_stateful_processor(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return holdfast's pipeline around nothing, in ``transformWithStateInPandas``."""
    from holdfast.spark_integration.hosts.stateful_processor import StatefulProcessorHost

    return _idle(frame, job, StatefulProcessorHost("update", "None", ""))


def _idle(frame: DataFrame, job: SparkJob, host: Host) -> DataFrame:
    from holdfast.spark_integration.plan.definition import Definition, KeyedRows
    from holdfast.spark_integration.plan.grouping_keys import resolve_keys
    from holdfast.spark_integration.plan.session import checked_settings
    from holdfast.spark_integration.spark_types import parse_struct
    from holdfast.spark_integration.transport.output import RowsOutput

    return Definition(
        rows=KeyedRows(frame, resolve_keys(frame, ["key"]).keys, _Idle()),
        name=OPERATOR,
        output=RowsOutput(parse_struct(job.output, "output")),
        host=host,
        transport=None,
        settings=checked_settings(frame, stacklevel=2),
    ).plan()


def spark_aggregation(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return the job as Spark's own aggregation."""
    return frame.groupBy("key").agg(*job.aggregates())


def by_key(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return a job by key on holdfast."""
    from holdfast.spark_integration.stream import stream

    assert isinstance(job, JobByKey)
    return (
        stream(frame)
        .groupBy("key")
        .applyInPandasWithState(job.one_key, job.output, job.state, "update", job.timeout_conf, name=OPERATOR)
    )


def spark_by_key(frame: DataFrame, job: SparkJob) -> DataFrame:
    """Return a job by key as Spark's own ``applyInPandasWithState``."""
    assert isinstance(job, JobByKey)
    return frame.groupBy("key").applyInPandasWithState(job.one_key, job.output, job.state, "update", job.timeout_conf)


def by_processor(frame: DataFrame, job: SparkJob, *, in_pandas: bool) -> DataFrame:
    """Return a job by processor on holdfast."""
    from holdfast.spark_integration.stream import stream

    assert isinstance(job, ByProcessor)
    grouped, processor = stream(frame).groupBy("key"), job.processor(in_pandas=in_pandas)
    method = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
    return method(processor, job.output, "update", "None", name=OPERATOR)


def spark_by_processor(frame: DataFrame, job: SparkJob, *, in_pandas: bool) -> DataFrame:
    """Return a job by processor as Spark's own ``transformWithState``."""
    assert isinstance(job, ByProcessor)
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
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    route = F.pmod(F.xxhash64("key"), F.lit(job.partitions)).cast("int")
    few = frame.select(route.alias("route"), *[name for name in frame.columns if name != "key"])
    return few.groupBy("route").applyInPandasWithState(_count, "n long", "n long", "update", "NoTimeout")


def live_bytes(local_dir: Path, backend_class: type[Backend], job: SparkJob) -> int:
    """Return the Arrow size of the newest version of all shards: key and value columns of live keys.

    Parameters
    ----------
    local_dir : pathlib.Path
        The ``spark.holdfast.local.dir`` of a run of `with_state`, whose Spark still runs.
    """
    from holdfast import clock
    from holdfast.spark_integration.shard.operator import STATE_TABLE

    table = _state_table(job, STATE_TABLE)
    total = 0
    for directory in local_dir.glob("holdfast-*/executor-*/**/shard-*"):
        with backend_class(directory, {STATE_TABLE: table}, clock.new_id) as backend:
            for pointer in backend.versions()[-1:]:
                with backend.view(pointer) as view:
                    total += sum(run.keys.nbytes + run.values.nbytes for run in view.scan(STATE_TABLE))
    return total


def _state_table(job: SparkJob, name: str) -> TableSchema:
    from pyspark.sql.types import StructType

    from holdfast.spark_integration.spark_types import arrow_schema, parse_struct

    key = StructType(parse_struct(job.output, "output").fields[:1])
    return TableSchema.of(name, arrow_schema(key, "the key"), arrow_schema(parse_struct(job.state, "state"), "state"))
