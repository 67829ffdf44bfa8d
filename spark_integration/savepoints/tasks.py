"""Tasks of savepoints: run for shards, with what becomes of their errors.

Spark runs them, or one process without Spark: `holdfast.spark_integration.savepoints.working`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pyarrow as pa

from holdfast import distribution, errors
from holdfast.errors import CorruptionError, HoldfastError, UnavailableError
from holdfast.settings import Settings
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.shard.task_storage import io_executor, storage_at
from holdfast.spark_integration.transport.routes import routes_of
from holdfast.spark_integration.worker_python import require_worker_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ShardTask(ABC):
    """What is done for each shard; in Spark, a function for ``mapInArrow``."""

    #: What it yields: ``operator``, ``shard`` and ``error`` among the columns; what a row lacks is null.
    RETURNED: ClassVar[pa.Schema]

    settings: Settings  #: Of the session, without credentials; their state directory is the query's
    target: str  #: URL of where it goes

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what becomes of each row; see `each_row`."""
        opened = partial(storage_at, settings=self.settings)
        return each_row(batches, lambda row: self.work(row, opened), self.RETURNED)

    @abstractmethod
    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[Mapping[str, Any]]:
        """Do it for a shard; `opened` gives the storage at a URL."""


def versions_of(spark: SparkSession) -> dict[str, str]:
    """Return the releases that make a savepoint by Spark."""
    return {"holdfast": distribution.VERSION, "spark": spark_versions.version_of(spark)}


def run_tasks(
    spark: SparkSession,
    shards: Sequence[tuple[Any, ...]],
    given: str,
    task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    returned: str,
) -> list[Row]:
    """Run a task for some shards, in as many tasks of Spark's, and return what they return.

    Raises `UnavailableError` if a task failed, as often as Spark repeats tasks; `HoldfastError`: that a task returned.

    `shards`: a row for each; none, and nothing runs; `given`, `returned`: the columns of these rows, and of what comes
    back: ``operator``, ``shard`` and ``error`` among them.
    """
    from pyspark.errors import PySparkException

    if not shards:
        return []
    try:
        # Each in a partition of its own: without a column Spark chooses at random, and one task may get two of them.
        rows = [(*row, route) for row, route in zip(shards, routes_of(len(shards)), strict=True)]
        frame = spark.createDataFrame(rows, f"{given}, route int").repartition(len(shards), "route")
        return run_frame(frame, task, returned)
    except PySparkException as exc:
        raise UnavailableError(f"tasks of the savepoint failed: {exc}") from exc


def run_frame(
    frame: DataFrame, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], returned: str
) -> list[Row]:
    """Run a task for each partition of a DataFrame; see `run_tasks`.

    Raises `PySparkException`: what the DataFrame raises, or Spark.
    """
    from pyspark.errors import PySparkException

    require_worker_python(frame.sparkSession)
    try:
        found = frame.mapInArrow(task, returned).collect()
    except PySparkException as exc:
        if _UNAVAILABLE not in str(exc):
            raise  # what failed is the DataFrame, or Spark
        raise UnavailableError(f"tasks of the savepoint failed: {exc}") from exc
    require_no_error(found)
    return found


def require_no_error(found: Iterable[Any]) -> None:
    """Raise the first error that rows of tasks return."""
    for row in found:
        if row["error"] is not None:
            raise _error_of(row["error"], row["operator"], row["shard"])


_UNAVAILABLE = f"{UnavailableError.__module__}.{UnavailableError.__qualname__}"


def each_ahead(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Generator[_Result, None, None]:
    """Call a function for each item as `map` does, several at once by this process's threads for storage requests."""
    return ahead(io_executor(), work, items)


def each_row(
    batches: Iterator[pa.RecordBatch],
    work: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]],
    returned: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """Yield what some work returns of each row that a task is given, or its error: repeating would not help.

    Raises `UnavailableError` if a storage did not answer; Spark repeats the task.

    `work`: returns rows as mappings; what they lack is null; `returned`: of these rows: ``operator``, ``shard`` and
    ``error`` among them.
    """
    for batch in batches:
        for row in batch.to_pylist():
            for outcome in outcomes(row, work):
                yield pa.RecordBatch.from_pylist([outcome], schema=returned)


def outcomes(
    row: Mapping[str, Any], work: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]]
) -> Iterator[Mapping[str, Any]]:
    """Yield what some work returns of a row, or its error; see `each_row`."""
    try:
        yield from work(row)
    except HoldfastError as exc:
        yield failed(row, exc)


def failed(facts: Mapping[str, Any], error: HoldfastError) -> dict[str, Any]:
    """Return an error as a task returns it, with the operator and the shard that `facts` name.

    Raises `UnavailableError` if it is one: Spark repeats the task.
    """
    if error.retryable:
        raise error
    return {"operator": facts["operator"], "shard": facts["shard"], "error": f"{type(error).__name__}: {error}"}


def _error_of(text: str, operator: str, shard: int) -> HoldfastError:
    """Return the error that a task returned as text."""
    kind, _, message = text.partition(": ")
    found = getattr(errors, kind, CorruptionError)
    assert issubclass(found, HoldfastError)
    error: HoldfastError = found(f"{operator}, shard {shard}: {message}")
    return error
