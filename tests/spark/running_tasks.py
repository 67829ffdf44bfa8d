"""Waits for what a failed query leaves behind."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def wait_for_tasks(session: SparkSession) -> None:
    """Return when no task runs: one of a failed query that outlives it may write into Spark's own checkpoint.

    Spark's state files have one name for all attempts at a micro-batch, so one of them counts there. The scheduler is
    asked: Spark's status tracker takes note of a task 100 ms after the one before it at the earliest, if at all.
    """
    scheduler = session.sparkContext._jsc.sc().taskScheduler()
    end = time.monotonic() + 120
    while any(map(int, re.findall(r"-> (\d+)", scheduler.runningTasksByExecutors().mkString(",")))):
        assert time.monotonic() < end, "a task of a failed query does not end"
        time.sleep(0.05)
