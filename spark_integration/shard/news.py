"""Reports a task's query and state directory to the driver of classic Spark, through an accumulator.

::

    task: claims ──▶ accumulator ──▶ at the task's end: the driver's Python

Spark returns an accumulator from each task that has unpickled it. The accumulator is therefore sent as bytes, and only
a task with news unpickles it: an executor's first task of a run, then one task every two minutes. Spark drops the news
of failed tasks, so a retried task reports, too.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from pyspark import TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from holdfast.spark_integration.shard.task import QUERY_PROPERTY


@dataclass(frozen=True)
class ActiveQuery:
    """A query that is working on its state."""

    query_id: str  #: Spark's id
    state_id: str  #: The id in the query's pointers and records
    state_dir: str


News = frozenset[ActiveQuery]


class NewsParam(AccumulatorParam[News]):
    """Merges the tasks' news."""

    def zero(self, value: News) -> News:
        return frozenset()

    def addInPlace(self, value1: News, value2: News) -> News:
        return value1 | value2


def packed(accumulator: Accumulator[News]) -> bytes:
    """Serialise an accumulator for the tasks."""
    return pickle.dumps(accumulator)


def is_repeated() -> bool:
    """Return whether the running task is a retry."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def report_to_driver(accumulator: bytes, state_id: str, state_dir: str | None) -> None:
    """Report this task's query to the driver, if the task knows the query and has an accumulator."""
    context = TaskContext.get()
    query_id = context.getLocalProperty(QUERY_PROPERTY) if context else None
    if accumulator and query_id and state_dir is not None:
        news: Accumulator[News] = pickle.loads(accumulator)  # noqa: S301
        news.add(frozenset({ActiveQuery(query_id, state_id, state_dir)}))
