"""What a task tells the driver of classic Spark, through an accumulator: which query it works for, and where.

::

    task: claims ──▶ accumulator ──▶ at the task's end: the driver's Python

Spark sends an accumulator back with each task that has unpickled it. So it travels as bytes, and only a task with news
unpickles it: the first of an executor in a run, then one every two minutes. It drops the news of failed tasks: so
each task that repeats another one has news, too.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from pyspark import TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam

from holdfast.spark_integration.shard.task import QUERY_PROPERTY


@dataclass(frozen=True)
class AtWork:
    """A query that is at work on its state."""

    query_id: str  #: Spark's
    state_id: str  #: The id in its pointers and records
    state_dir: str


News = frozenset[AtWork]


class NewsParam(AccumulatorParam[News]):
    """Merges the tasks' news."""

    def zero(self, value: News) -> News:
        """Return no news."""
        return frozenset()

    def addInPlace(self, value1: News, value2: News) -> News:
        """Return both."""
        return value1 | value2


def packed(accumulator: Accumulator[News]) -> bytes:
    """Return an accumulator as it travels."""
    return pickle.dumps(accumulator)


def is_repeated() -> bool:
    """Tell whether Spark repeats the running task."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def tell_driver(accumulator: bytes, state_id: str, state_dir: str | None) -> None:
    """Report this task's query to the driver, if the task knows it and the driver asks for it."""
    context = TaskContext.get()
    query_id = context.getLocalProperty(QUERY_PROPERTY) if context else None
    if accumulator and query_id and state_dir is not None:
        news: Accumulator[News] = pickle.loads(accumulator)  # noqa: S301
        news.add(frozenset({AtWork(query_id, state_id, state_dir)}))
