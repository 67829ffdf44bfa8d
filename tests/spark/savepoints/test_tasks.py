"""Tasks of savepoints: how rows are shared among them, and what becomes of their errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

from holdfast.errors import CorruptionError, UnavailableError
from holdfast.spark_integration.savepoints.tasks import each_row, run_tasks

GIVEN = "operator string, shard int"
RETURNED = "operator string, shard int, task int, error string"
SCHEMA = pa.schema([("operator", pa.string()), ("shard", pa.int32()), ("task", pa.int32()), ("error", pa.string())])


def told(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield for each row in which task it is; that of shard 7 is damaged, and of shard 8 cannot be read now."""

    def work(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if row["shard"] == 7:
            raise CorruptionError("a piece is damaged", key="k")
        if row["shard"] == 8:
            raise UnavailableError("no answer")
        context = TaskContext.get()
        assert context is not None
        yield {"operator": row["operator"], "shard": row["shard"], "task": context.partitionId()}

    return each_row(batches, work, SCHEMA)


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_each_row_has_a_task_of_its_own(spark: SparkSession, shards: int) -> None:
    """Else one core copies two shards while another one is idle."""
    rows = [("totals", 0 if shard == shards - 1 else shard) for shard in range(shards)]  # also two that are the same
    found = run_tasks(spark, rows, GIVEN, told, RETURNED)
    assert sorted(row["task"] for row in found) == list(range(shards))
    assert sorted((row["operator"], row["shard"]) for row in found) == sorted(rows)


def test_an_error_that_repeating_cannot_help_comes_back_as_itself(spark: SparkSession) -> None:
    with pytest.raises(CorruptionError, match="totals, shard 7: a piece is damaged, key=k"):
        run_tasks(spark, [("totals", 1), ("totals", 7)], GIVEN, told, RETURNED)


def test_an_error_that_repeating_may_help_fails_the_task(spark: SparkSession) -> None:
    with pytest.raises(UnavailableError, match="no answer"):
        run_tasks(spark, [("totals", 8)], GIVEN, told, RETURNED)
