"""The work of a bench: a job is a plain value with the sizes of a run, and defines its rows and the computation.

::

    micro-batches   0 … f-1          f … f+w-1          f+w … f+batches-1
                    fill the state   warm-up            counted
                    (`fill_batches`) (`warmup`)         (`counted`)

An engine decides where state is kept; it runs every job of the class `Engine.runs`.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

import click
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import holdfast
from holdfast.benches.instruments.measured import Measured, Places
from holdfast.errors import InvalidArgumentError


class FiniteRange(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


ENDPOINT = "AWS_ENDPOINT_URL"
#: Event time of the first micro-batch, in s since 1970.
FIRST_SECOND = 1_700_000_000
SEEDS_PER_PARTITION = 8
_MAY_BE_ZERO = ("warmup", "latency_ms", "executors", "waiting")


def option(default: Any, description: str, kind: Any = None) -> Any:
    """Return a field of a job, which is also an option of its command; `kind` is a click type, or None."""
    return field(default=default, metadata={"help": description, "type": kind})


@dataclass(frozen=True)
class Job:
    """The sizes of one run, stored with its results."""

    name: ClassVar[str]

    rows: int = option(1_000_000, "rows per micro-batch")
    keys: int = option(1_000_000, "possible keys")
    batches: int = option(8, "micro-batches of a run, after those that fill the state")
    warmup: int = option(2, "uncounted micro-batches at the start")
    memory_mb: int | None = option(None, "memory of engines on RocksDB, MiB; default: their own", click.IntRange(1))

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in asdict(self).items() if not isinstance(value, bool)}
        small = [name for name, value in sizes.items() if name not in _MAY_BE_ZERO and value in (0, -1)]
        if small or not 0 <= self.warmup < self.batches:
            raise InvalidArgumentError("sizes must be at least 1, and --batches above --warmup", job=self.stored())

    @property
    def fill_batches(self) -> int:
        """Micro-batches before those of `batches`, which fill the state."""
        return 0

    @property
    def all_batches(self) -> int:
        return self.fill_batches + self.batches

    @property
    def counted(self) -> range:
        return range(self.fill_batches + self.warmup, self.all_batches)

    def stored(self) -> dict[str, Any]:
        """Return the job as JSON values; `holdfast.benches.jobs.by_name.read_job` reads it."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class StreamingJob(Job, ABC):
    """A streaming query."""

    slots: int = option(2, "task slots: local[slots]")
    partitions: int = option(2, "shuffle partitions")
    sources: int = option(2, "partitions of the source")
    snapshot_commits: int | None = option(None, "commits between snapshots; default: holdfast's, for job B never")
    plain_files: bool = option(False, "let Spark write checkpoint files without forking: docs/configuration.md", bool)
    executors: int = option(0, "executors of a standalone cluster, one core each; default: no cluster")
    state_dir: str = option("s3://bucket/bench", f"where engines on S3 commit; {ENDPOINT} may name the server")
    latency_ms: float = option(0.0, "extra latency of each request to S3, ms", FiniteRange(min=0))

    def settings(self) -> dict[str, str]:
        """Return the Spark settings that all engines share."""
        chosen: dict[str, str] = {}
        if self.snapshot_commits is not None:
            chosen["spark.holdfast.snapshot.maxCommits"] = str(self.snapshot_commits)
            chosen["spark.holdfast.snapshot.maxBytes"] = str(1 << 50)  # else 64 MiB of commits trigger snapshots, too
        if self.plain_files:
            manager = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
            chosen["spark.sql.streaming.checkpointFileManagerClass"] = manager
        return chosen | {
            "spark.master": f"local[{self.slots}]",
            "spark.driver.memory": "4g",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.adaptive.enabled": "false",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": str(self.partitions),
            "spark.sql.streaming.numRecentProgressUpdates": str(self.all_batches + 10),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }

    @abstractmethod
    def source(self, spark: SparkSession) -> DataFrame:
        """Return the streaming rows: grouping columns, and the columns that the job aggregates."""

    def verify(self, settings: Mapping[str, str], places: Places, table: str, *, ours: bool) -> dict[str, Any]:
        """Compare a table of the final state with the expected one, for jobs that can compute that."""
        return {}

    def numbers(self, spark: SparkSession) -> DataFrame:
        """Return ascending numbers as ``value``, `rows` per micro-batch."""
        return _ticks(spark, self.rows, self.sources)


@dataclass(frozen=True)
class SparkJob(StreamingJob, ABC):
    """A streaming query with one row of state per ``key``; `output` and `state` are Spark's schemas."""

    output: ClassVar[str]
    state: ClassVar[str]

    def without_snapshots(self) -> Self:
        """Return the same job without snapshots."""
        return replace(self, snapshot_commits=self.all_batches + 1)

    @abstractmethod
    def reduce(self, batch: holdfast.ShardBatch) -> pa.Table:
        """Return the state that results from one micro-batch, one row per key."""

    @abstractmethod
    def combine(self, old: Mapping[str, pa.Array], new: pa.Table) -> pa.Table:
        """Return the new state of keys: their `old` state (null if absent) combined with that of the `new` rows."""

    @abstractmethod
    def aggregates(self) -> list[Column]:
        """Return the same computation as Spark aggregations, named like the columns of `state`."""

    def stateful(self, batch: holdfast.ShardBatch) -> pa.Table:
        """Add a micro-batch to its keys' state: the function for holdfast."""
        state = self.combine(batch.state.get(), self.reduce(batch))
        batch.state.put(state)
        return _beside(batch.keys, state)

    def stateless(self, batch: holdfast.ShardBatch) -> pa.Table:
        """Reduce a micro-batch without state: the same work on rows."""
        return _beside(batch.keys, self.reduce(batch))


@dataclass(frozen=True)
class StoreJob(Job, ABC):
    """Work on the store alone, without Spark."""

    @abstractmethod
    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        """Do the work in this process, which does nothing else; `options` configure the backend."""


def numbered_rows(spark: SparkSession, job: StreamingJob, fill_rows: int) -> DataFrame:
    """Return each row's micro-batch, ``batch``, and number in it, ``i``, expanded from seeds of Spark's source."""
    seeds = SEEDS_PER_PARTITION * job.sources
    batch, seed = F.expr(f"value div {seeds}").alias("batch"), (F.col("value") % seeds).alias("seed")
    wanted = F.when(F.col("batch") < job.fill_batches, fill_rows).otherwise(job.rows)
    first, end = (F.floor(wanted * (F.col("seed") + i) / seeds) for i in (0, 1))
    numbered = _ticks(spark, seeds, job.sources).select(batch, seed)
    return numbered.select("batch", F.explode(F.sequence(first, end - 1)).alias("i"))


def _ticks(spark: SparkSession, rows: int, partitions: int) -> DataFrame:
    reader = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows)
    return reader.option("numPartitions", partitions).load()


def server_of_environment() -> str:
    """Return the S3 server's URL from the environment, or ""; TLS is refused, since it hides requests."""
    server = os.environ.get(ENDPOINT, "")
    if server and not server.startswith("http://"):
        raise InvalidArgumentError(
            "requests cannot be counted through TLS: set an http:// endpoint, as `make s3` shows, or unset it, so that "
            "the bench starts its own server",
            variable=ENDPOINT,
        )
    return server


def _beside(keys: pa.Table, values: pa.Table) -> pa.Table:
    return pa.table([*keys.columns, *values.columns], names=[*keys.column_names, *values.column_names])
