"""The state already stored for an operator, looked up by an executor when the operator is defined."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession

from holdfast.errors import HoldfastError, SchemaMismatchError
from holdfast.settings import Settings
from holdfast.snapshotter.ownership.operator_record import find_operator
from holdfast.snapshotter.ownership.stored_tables import stored_tables
from holdfast.spark_integration.failures import passes
from holdfast.spark_integration.shard.operator import ShardFunction
from holdfast.spark_integration.shard.task_storage import state_storage

_log = logging.getLogger(__name__)
_COLUMNS = "shards int, query string, problem string"
_FOUND = pa.schema([("shards", pa.int32()), ("query", pa.string()), ("problem", pa.string())])


@dataclass(frozen=True)
class StoredState:
    """The state under an operator's name."""

    shards: int | None  #: How many it was written with; None if there is none, or it cannot be read
    query: str | None  #: The id of the query that it is of
    problem: str | None  #: Why the operator cannot go on with it


def stored_state(session: SparkSession, settings: Settings, operator: str, function: ShardFunction) -> StoredState:
    """Return the stored state of an operator's name.

    Runs a job of one task, because only executors are sure to have the storage's credentials and network. Storage that
    cannot be read is no error here: the query itself will fail, unless all happens to be as it should.
    """

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            found = StoredState(None, None, None)
            try:
                found = _look(settings, operator, function)
            except HoldfastError as exc:
                _log.warning("the stored state of %r cannot be read: %s", operator, exc)
            yield pa.RecordBatch.from_pylist([vars(found)], schema=_FOUND)

    found = session.range(1, numPartitions=1).mapInArrow(look, _COLUMNS)
    try:
        (row,) = found.collect()
    except Exception as exc:
        if not passes(exc):  # Spark repeats no task of a local master
            raise
        _log.warning("the look at the stored state of %r failed, and is repeated: %s", operator, exc)
        (row,) = found.collect()
    return StoredState(row["shards"], row["query"], row["problem"])


def _look(settings: Settings, operator: str, function: ShardFunction) -> StoredState:
    storage = state_storage(settings)
    record = None if storage is None else find_operator(storage, operator)
    if storage is None or record is None:
        return StoredState(None, None, None)
    problem = None
    try:
        tables = stored_tables(storage, record).with_changes(function.changes())
        function.require_restartable(tables, record.configuration)
    except SchemaMismatchError as exc:
        problem = str(exc)
    except HoldfastError as exc:
        _log.warning("the tables of %r cannot be read: %s", operator, exc)
    return StoredState(record.shards, record.query_id, problem)
