"""The number of shards that an operator's state was written with, looked up by an executor."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from holdfast.errors import HoldfastError
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.operator_record import find_operator
from holdfast.spark_integration.shard.task_storage import checkpoint_storage

_log = logging.getLogger(__name__)


def stored_shards(session: SparkSession, settings: Settings, operator: str) -> int | None:
    """Return the number of shards in an operator's record; None if there is no record or it cannot be read.

    Runs a job of one task, because only executors are sure to have the storage's credentials and network. Storage that
    cannot be read is no error here: the query itself will fail, unless the number happens to be the stored one.
    """

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            try:
                storage = checkpoint_storage(settings)
                record = None if storage is None else find_operator(storage, operator)
            except HoldfastError as exc:
                _log.warning("the number of shards of %r cannot be read: %s", operator, exc)
                record = None
            yield pa.RecordBatch.from_pydict({"shards": pa.array([record and record.shards], pa.int32())})

    rows = session.range(1, numPartitions=1).mapInArrow(look, "shards int").collect()
    stored = rows[0]["shards"]
    return None if stored is None else int(stored)
