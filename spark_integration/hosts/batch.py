"""The host of batch queries: ``applyInPandas``, since state begins empty and ends with the query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.mvcc import Transaction
from holdfast.spark_integration.hosts.host import SentRows
from holdfast.spark_integration.shard.operator import BatchTimes
from holdfast.spark_integration.shard_call.call import ShardStep
from holdfast.spark_integration.transport.routes import ROUTE


def run_batch(rows: SentRows, initial: SentRows | None) -> DataFrame:
    """Return the output of all shards' calls."""
    step, groups = rows.step, rows.frame.groupBy(ROUTE)
    schema = step.output.sent_schema
    if initial is None:

        def shard(key: tuple[Any, ...], frame: pd.DataFrame) -> pd.DataFrame:
            return _called(key, [(step, frame)])

        return groups.applyInPandas(shard, schema)
    first = initial.step

    def begun_shard(key: tuple[Any, ...], initial_frame: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
        return _called(key, [(first, initial_frame), (step, frame)])

    return initial.frame.groupBy(ROUTE).cogroup(groups).applyInPandas(begun_shard, schema)


def _called(key: tuple[Any, ...], parts: list[tuple[ShardStep, pd.DataFrame]]) -> pd.DataFrame:
    """Run one shard: its steps, one after the other, on the same state."""
    step = parts[-1][0]
    transaction = Transaction(None, 1, None, step.operator.function.tables(), _keep_nothing)
    batches = list(_batches(key, parts, transaction))
    # As one: the worker cannot convert columns that pandas has put together from Arrow's.
    frames = list(step.output.send([pa.concat_batches(batches)] if batches else []))
    return pd.concat(frames) if frames else pd.DataFrame()


def _batches(
    key: tuple[Any, ...], parts: list[tuple[ShardStep, pd.DataFrame]], transaction: Transaction
) -> Iterator[pa.RecordBatch]:
    # The task's properties are no help: a batch query inside foreachBatch inherits those of the streaming query.
    now_ms, earliest_timer_ms = clock.now_ms(), None
    for step, frame in parts:
        # As in a stream, where initial state has a version of its own: elements of lists are numbered by version.
        transaction.version = step.operator.first_version
        times = BatchTimes(now_ms, None, earliest_timer_ms, None)
        batch = step.operator.input_of(step.received([frame]), step.shard_of(key), None, times)
        earliest_timer_ms = yield from step.operator.function.run(batch, transaction)


def _keep_nothing(transaction: Transaction, runs: object) -> Pointer:
    raise AssertionError("a batch query has no state to commit")
