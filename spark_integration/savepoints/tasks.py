"""Tasks of savepoints: run for shards, with what becomes of their errors, and a folder to work in."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast import errors
from holdfast.errors import CorruptionError, HoldfastError, UnavailableError
from holdfast.settings import Settings
from holdfast.spark_integration.executor import local_dirs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


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
        return run_frame(spark.createDataFrame(shards, given).repartition(len(shards)), task, returned)
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


@contextmanager
def working_folder(settings: Settings) -> Iterator[Path]:
    """Give a folder where executors keep what is large; it is gone after the context.

    Raises
    ------
    UnavailableError
        It cannot be made.
    """
    disk = local_dirs.choose_root(settings.local_dir, in_memory=False)
    try:
        disk.mkdir(parents=True, exist_ok=True)
        home = tempfile.TemporaryDirectory(prefix="holdfast-savepoint-", dir=disk)
    except OSError as exc:
        raise UnavailableError(
            f"nothing can be kept under {disk} ({exc.strerror}): make it writable, or name another directory in "
            "spark.holdfast.local.dir"
        ) from exc
    with home:
        yield Path(home.name)


def as_text(error: HoldfastError) -> str:
    """Return an error as a task returns it."""
    return f"{type(error).__name__}: {error}"


def _error_of(text: str, operator: str, shard: int) -> HoldfastError:
    """Return the error that a task returned as text."""
    kind, _, message = text.partition(": ")
    found = getattr(errors, kind, CorruptionError)
    assert issubclass(found, HoldfastError)
    error: HoldfastError = found(f"{operator}, shard {shard}: {message}")
    return error
