"""Job A: running count and sum for each key, over rows that Spark itself makes.

Each micro-batch holds `Job.rows` rows of Spark's ``rate-micro-batch`` source; their keys are spread evenly
over `Job.keys`. Every engine gets the same frame, writes to the ``noop`` sink and runs under the same base
settings, so that what differs is how state is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.state import GroupState

    from holdfast.spark_integration.shard_batch import ShardBatch

OUTPUT = "key long, n long, s long"
STATE = "n long, s long"


@dataclass(frozen=True)
class Job:
    """The size of one run; plain values, stored beside its results.

    Attributes
    ----------
    rows : int
        Rows of a micro-batch.
    keys : int
        Possible keys.
    batches, warmup : int
        Micro-batches in all, and how many of them are not counted: the first ones.
    slots : int
        Task slots: ``local[slots]``.
    partitions : int
        Partitions of the source and of the shuffle.
    transport : str or None
        ``spark.holdfast.transport``; None leaves it to the operator. Engines of Spark's own ignore it.
    """

    rows: int = 1_000_000
    keys: int = 1_000_000
    batches: int = 8
    warmup: int = 2
    slots: int = 2
    partitions: int = 2
    transport: str | None = None

    def __post_init__(self) -> None:
        if min(self.rows, self.keys, self.slots, self.partitions) < 1 or not 0 <= self.warmup < self.batches:
            raise InvalidArgumentError("a bench needs rows, keys, slots, partitions and batches beyond its warm-up")

    def base_settings(self) -> dict[str, str]:
        """Return the Spark settings that all engines share."""
        return {
            "spark.master": f"local[{self.slots}]",
            "spark.driver.memory": "4g",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.adaptive.enabled": "false",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": str(self.partitions),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }


def source(spark: SparkSession, job: Job) -> DataFrame:
    """Return the streaming rows (key, v)."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

    rows = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", job.rows)
        .option("numPartitions", job.partitions)
        .load()
    )
    return rows.select((F.abs(F.xxhash64("value")) % job.keys).alias("key"), (F.col("value") % 100).alias("v"))


def totals(batch: ShardBatch) -> pa.Table:
    """Add a micro-batch to the running count and sum of its keys."""
    old = batch.state.get()
    n = pc.add(pc.coalesce(old["n"], pa.scalar(0)), batch.groups.count())
    s = pc.add(pc.coalesce(old["s"], pa.scalar(0)), batch.groups.sum("v"))
    batch.state.put(n=n, s=s)
    return batch.keys.append_column("n", n).append_column("s", s)


def floor(batch: ShardBatch) -> pa.Table:
    """Count and add up the micro-batch alone: the same work on rows, and no state."""
    return batch.keys.append_column("n", batch.groups.count()).append_column("s", batch.groups.sum("v"))


def holdfast_query(frame: DataFrame, _job: Job) -> DataFrame:
    """Return job A on holdfast."""
    from holdfast.spark_integration.stream import stream

    return stream(frame).groupBy("key").applyInArrowWithState(totals, OUTPUT, STATE, "update")


def floor_query(frame: DataFrame, _job: Job) -> DataFrame:
    """Return holdfast's pipeline around a function that keeps no state."""
    from holdfast.spark_integration.stream import stream

    return stream(frame).groupBy("key").applyInArrowWithState(floor, OUTPUT, STATE, "update")


def spark_aggregation(frame: DataFrame, _job: Job) -> DataFrame:
    """Return job A as Spark's own aggregation."""
    from pyspark.sql import functions as F  # noqa: N812

    return frame.groupBy("key").agg(F.count("*").alias("n"), F.sum("v").alias("s"))


def _count(_key: tuple[object, ...], chunks: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    rows = sum(len(chunk) for chunk in chunks)
    before = state.get[0] if state.exists else 0
    state.update((before + rows,))
    yield pd.DataFrame({"n": [before + rows]})


def spark_counting(frame: DataFrame, job: Job) -> DataFrame:
    """Return Spark's ``applyInPandasWithState`` doing next to nothing: as many keys as partitions, counted."""
    from pyspark.sql import functions as F  # noqa: N812

    few = frame.select((F.col("key") % job.partitions).cast("int").alias("route"), "v")
    return few.groupBy("route").applyInPandasWithState(_count, "n long", "n long", "update", "NoTimeout")


def live_state_bytes(local_dir: Path) -> int:
    """Return the Arrow size of the newest version of all shards: key and value columns of live keys.

    Parameters
    ----------
    local_dir : pathlib.Path
        The ``spark.holdfast.local.dir`` of a run of `holdfast_query`.
    """
    from holdfast import clock
    from holdfast.backends.memory import MemoryBackend
    from holdfast.backends.run import TableSchema
    from holdfast.spark_integration.shard_batch import STATE_TABLE

    key = pa.schema([("key", pa.int64())])
    value = pa.schema([("n", pa.int64()), ("s", pa.int64())])
    tables = {STATE_TABLE: TableSchema.of(STATE_TABLE, key, value)}
    total = 0
    for directory in local_dir.glob("holdfast-*/executor-*/*/*/shard-*"):
        with MemoryBackend(directory, tables, clock.new_id) as backend:
            for pointer in backend.versions()[-1:]:
                with backend.view(pointer) as view:
                    total += sum(run.keys.nbytes + run.values.nbytes for run in view.scan(STATE_TABLE))
    return total
