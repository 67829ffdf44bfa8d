"""What a bench runs: a job is a plain value that says how large a run is, and knows its rows and what is computed.

::

    micro-batches   0 … f-1          f … f+w-1          f+w … f+batches-1
                    fill the state   warm-up            counted
                    (`fill_batches`) (`warmup`)         (`counted`)

An engine knows where state is kept, and runs every job of the kind that it names (`Engine.runs`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import click
import pyarrow as pa

from holdfast.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from holdfast.benches.instruments.measured import Measured, Places
    from holdfast.spark_integration.shard.timeout import TimeMode
    from holdfast.spark_integration.vectorised.batch import ShardBatch


_MAY_BE_ZERO = ("warmup", "latency_ms")


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


_MAX_COMMITS = "spark.holdfast.snapshot.maxCommits"
_FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_PLAIN_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


@dataclass(frozen=True)
class StreamingJob(Job, ABC):
    """A streaming query."""

    slots: int = option(2, "task slots: local[slots]")
    partitions: int = option(2, "partitions of the shuffle")
    sources: int = option(2, "partitions of the source")
    transport: str | None = option(
        None, "spark.holdfast.transport; by default the operator's own", click.Choice(["packed", "rows"])
    )

    snapshot_commits: int | None = option(
        None, "commits of a shard after which a snapshot is due; by default holdfast's own, for job B never"
    )

    plain_files: bool = option(False, "Spark writes its checkpoint files without forking: docs/configuration.md")

    def settings(self) -> dict[str, str]:
        """Return the Spark settings that all engines share."""
        chosen = {} if self.snapshot_commits is None else {_MAX_COMMITS: str(self.snapshot_commits)}
        if self.plain_files:
            chosen[_FILE_MANAGER] = _PLAIN_FILES
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


@dataclass(frozen=True)
class SparkJob(StreamingJob, ABC):
    """A streaming query that keeps one row of state for each ``key``.

    Attributes
    ----------
    output, state : str
        Columns of the result, and of each key's state, as Spark writes schemas.
    """

    output: ClassVar[str]
    state: ClassVar[str]

    @property
    def time_mode(self) -> TimeMode:
        """The clock of the vectorised function's timers."""
        return "None"

    @property
    def ttl_ms(self) -> int | None:
        """How long the vectorised function's state lives."""
        return None

    def without_snapshots(self) -> Self:
        """Return the same job, in which no snapshot is due."""
        return replace(self, snapshot_commits=self.all_batches + 1)

    @abstractmethod
    def reduce(self, batch: ShardBatch) -> pa.Table:
        """Return the state that a micro-batch alone would make, one row for each of its keys."""

    @abstractmethod
    def combine(self, old: Mapping[str, pa.Array], new: pa.Table) -> pa.Table:
        """Return the state of keys that had `old` (null where there was none) and got `new`."""

    @abstractmethod
    def aggregates(self) -> list[Column]:
        """Return the same as aggregations of Spark's own, named as the columns of `state`."""

    def stateful(self, batch: ShardBatch) -> pa.Table:
        """Add a micro-batch to its keys' state; what holdfast calls."""
        state = self.combine(batch.state.get(), self.reduce(batch))
        batch.state.put(state)
        return beside(batch.keys, state)

    def stateless(self, batch: ShardBatch) -> pa.Table:
        """Reduce a micro-batch alone: the same work on rows, and no state."""
        return beside(batch.keys, self.reduce(batch))


@dataclass(frozen=True)
class StoreJob(Job, ABC):
    """Work on the store alone, without Spark."""

    @abstractmethod
    def measure(self, backend_name: str, options: Mapping[str, str], places: Places) -> Measured:
        """Do the work in this process, which does nothing else.

        Parameters
        ----------
        options : mapping of str to str
            Of the backend.
        """


def beside(keys: pa.Table, values: pa.Table) -> pa.Table:
    """Return the columns of both."""
    return pa.table([*keys.columns, *values.columns], names=[*keys.column_names, *values.column_names])
