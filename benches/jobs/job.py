"""What a bench runs: a job is a plain value that says how large a run is, and knows its rows and what is computed.

::

    micro-batches   0 … f-1          f … f+w-1          f+w … f+batches-1
                    fill the state   warm-up            counted
                    (`fill_batches`) (`warmup`)         (`counted`)

An engine knows where state is kept, and runs every job of the kind that it names (`Engine.runs`).
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
    """A range of finite numbers."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


ENDPOINT = "AWS_ENDPOINT_URL"
#: When the rows of the first micro-batch happen, in s since 1970.
FIRST_SECOND = 1_700_000_000
SEEDS_PER_PARTITION = 8
_MAY_BE_ZERO = ("warmup", "latency_ms", "executors", "waiting")


def option(default: Any, description: str, kind: Any = None) -> Any:
    """Return a field of a job, which is an option of its command too; `kind` is a type of click, or None."""
    return field(default=default, metadata={"help": description, "type": kind})


@dataclass(frozen=True)
class Job:
    """The size of one run; stored beside its results."""

    name: ClassVar[str]

    rows: int = option(1_000_000, "rows of a micro-batch")
    keys: int = option(1_000_000, "possible keys")
    batches: int = option(8, "micro-batches of a run, without those that fill the state")
    warmup: int = option(2, "first of these, which are not counted")
    memory_mb: int | None = option(
        None, "MiB of memory for engines on RocksDB; by default what they choose", click.IntRange(1)
    )

    def __post_init__(self) -> None:
        sizes = {name: value for name, value in asdict(self).items() if not isinstance(value, bool)}
        small = [name for name, value in sizes.items() if name not in _MAY_BE_ZERO and value in (0, -1)]
        if small or not 0 <= self.warmup < self.batches:
            raise InvalidArgumentError(
                "a bench needs sizes of at least 1, and more batches than its warm-up has", job=self.stored()
            )

    @property
    def fill_batches(self) -> int:
        """Micro-batches before the first one of `batches`, which only bring the state to its size."""
        return 0

    @property
    def all_batches(self) -> int:
        """Micro-batches of a run."""
        return self.fill_batches + self.batches

    @property
    def counted(self) -> range:
        """The micro-batches that count."""
        return range(self.fill_batches + self.warmup, self.all_batches)

    def stored(self) -> dict[str, Any]:
        """Return the job as JSON values; `holdfast.benches.jobs.by_name.read_job` reads it."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class StreamingJob(Job, ABC):
    """A streaming query."""

    slots: int = option(2, "task slots: local[slots]")
    partitions: int = option(2, "partitions of the shuffle")
    sources: int = option(2, "partitions of the source")
    snapshot_commits: int | None = option(
        None, "commits of a shard after which a snapshot is due; by default holdfast's own, for job B never"
    )
    plain_files: bool = option(
        False, "whether Spark writes checkpoint files without forking: docs/configuration.md", bool
    )
    executors: int = option(0, "executors of a standalone cluster, with a core each; by default none is started")
    state_dir: str = option("s3://bucket/bench", f"where engines on S3 keep commits; {ENDPOINT} may name the server")
    latency_ms: float = option(0.0, "ms that the S3 server takes longer for each request", FiniteRange(min=0))

    def settings(self) -> dict[str, str]:
        """Return the Spark settings that all engines share."""
        chosen: dict[str, str] = {}
        if self.snapshot_commits is not None:
            chosen["spark.holdfast.snapshot.maxCommits"] = str(self.snapshot_commits)
            chosen["spark.holdfast.snapshot.maxBytes"] = str(1 << 50)  # by default 64 MiB of commits make one due, too
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
        """Return the streaming rows: what is grouped by, and what the job adds up."""

    def verify(self, settings: Mapping[str, str], places: Places, table: str, *, ours: bool) -> dict[str, Any]:
        """Compare what a run has left in a table of its state with what is right, where a job knows it."""
        return {}

    def numbers(self, spark: SparkSession) -> DataFrame:
        """Return ascending numbers as ``value``, `rows` in each micro-batch."""
        return _ticks(spark, self.rows, self.sources)


@dataclass(frozen=True)
class SparkJob(StreamingJob, ABC):
    """A streaming query with one row of state per ``key``; `output` and `state` are Spark's schemas."""

    output: ClassVar[str]
    state: ClassVar[str]

    def without_snapshots(self) -> Self:
        """Return the same job, in which no snapshot is due."""
        return replace(self, snapshot_commits=self.all_batches + 1)

    @abstractmethod
    def reduce(self, batch: holdfast.ShardBatch) -> pa.Table:
        """Return the state that a micro-batch alone would make, one row for each of its keys."""

    @abstractmethod
    def combine(self, old: Mapping[str, pa.Array], new: pa.Table) -> pa.Table:
        """Return the state of keys that had `old` (null where there was none) and got `new`."""

    @abstractmethod
    def aggregates(self) -> list[Column]:
        """Return the same as aggregations of Spark's own, named as the columns of `state`."""

    def stateful(self, batch: holdfast.ShardBatch) -> pa.Table:
        """Add a micro-batch to its keys' state; what holdfast calls."""
        state = self.combine(batch.state.get(), self.reduce(batch))
        batch.state.put(state)
        return _beside(batch.keys, state)

    def stateless(self, batch: holdfast.ShardBatch) -> pa.Table:
        """Reduce a micro-batch alone: the same work on rows, and no state."""
        return _beside(batch.keys, self.reduce(batch))


@dataclass(frozen=True)
class StoreJob(Job, ABC):
    """Work on the store alone, without Spark."""

    @abstractmethod
    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        """Do the work in this process, which does nothing else; `options` are of the backend."""


def numbered_rows(spark: SparkSession, job: StreamingJob, fill_rows: int) -> DataFrame:
    """Return each row's micro-batch, ``batch``, and number in it, ``i``, made from a few seeds of Spark's source."""
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
            "requests are counted at a server without TLS: name one in the environment, as `make s3` shows, or none: "
            "the bench then starts its own",
            variable=ENDPOINT,
        )
    return server


def _beside(keys: pa.Table, values: pa.Table) -> pa.Table:
    return pa.table([*keys.columns, *values.columns], names=[*keys.column_names, *values.column_names])
