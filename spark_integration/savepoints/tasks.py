"""What tasks of savepoints return, and what becomes of their errors on the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import errors
from holdfast.errors import CorruptionError, HoldfastError, UnavailableError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row


def collected(frame: DataFrame) -> list[Row]:
    """Run the tasks, and return what they return.

    Raises
    ------
    UnavailableError
        They failed, as often as Spark repeats tasks.
    """
    from pyspark.errors import PySparkException

    try:
        return frame.collect()
    except PySparkException as exc:
        raise UnavailableError(f"tasks of the savepoint failed: {exc}") from exc


def as_text(error: HoldfastError) -> str:
    """Return an error as a task returns it."""
    return f"{type(error).__name__}: {error}"


def error_of_task(text: str, operator: str, shard: int) -> HoldfastError:
    """Return the error that a task returned as text."""
    kind, _, message = text.partition(": ")
    found = getattr(errors, kind, CorruptionError)
    assert issubclass(found, HoldfastError)
    error: HoldfastError = found(f"{operator}, shard {shard}: {message}")
    return error
