"""Tasks of savepoints: run for shards, with what becomes of their errors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from holdfast import errors
from holdfast.errors import CorruptionError, HoldfastError, UnavailableError
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.spark_integration.shard.task_storage import io_executor
from holdfast.spark_integration.transport.routes import routes_of
from holdfast.spark_integration.worker_python import require_worker_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def run_tasks(
    spark: SparkSession,
    shards: Sequence[tuple[Any, ...]],
    given: str,
    task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    returned: str,
) -> list[Row]:
    """Run a task for some shards, in as many tasks of Spark's, and return what they return.

    Parameters
    ----------
    shards : sequence of tuple
        A row for each; none, and nothing runs.
    given, returned : str
        The columns of these rows, and of what comes back: ``operator``, ``shard`` and ``error`` among them.

    Raises
    ------
    UnavailableError
        A task failed, as often as Spark repeats tasks.
    HoldfastError
        That a task returned.
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

    Raises
    ------
    PySparkException
        What the DataFrame raises, or Spark.
    """
    from pyspark.errors import PySparkException

    require_worker_python(frame.sparkSession)
    try:
        found = frame.mapInArrow(task, returned).collect()
    except PySparkException as exc:
        if _UNAVAILABLE not in str(exc):
            raise  # what failed is the DataFrame, or Spark
        raise UnavailableError(f"tasks of the savepoint failed: {exc}") from exc
    for row in found:
        if row["error"] is not None:
            raise _error_of(row["error"], row["operator"], row["shard"])
    return found


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

    Parameters
    ----------
    work : callable
        Returns rows as mappings; what they lack is null.
    returned : pyarrow.Schema
        Of these rows: ``operator``, ``shard`` and ``error`` among them.

    Raises
    ------
    UnavailableError
        A storage did not answer; Spark repeats the task.
    """
    for batch in batches:
        for row in batch.to_pylist():
            try:
                for outcome in work(row):
                    yield pa.RecordBatch.from_pylist([outcome], schema=returned)
            except HoldfastError as exc:
                yield pa.RecordBatch.from_pylist([failed(row, exc)], schema=returned)


def failed(facts: Mapping[str, Any], error: HoldfastError) -> dict[str, Any]:
    """Return an error as a task returns it, with the operator and the shard that `facts` name.

    Raises
    ------
    UnavailableError
        It is one: Spark repeats the task.
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
