"""Reads the state of a query from outside, as it was after a micro-batch.

The query may be running or not; nothing of it is changed. The operator is the one of Spark's operators with state whose
pointers name its directory: ``totals``, or ``totals@<query>`` if another query took the name first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.backends.evolution import evolved
from holdfast.backends.run import Run, TableSchema
from holdfast.backends.schema import find_table
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import read_operator, shard_prefix
from holdfast.snapshotter.ownership.stored_tables import StoredTables, stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.version_rows import read_tables
from holdfast.spark_integration.executor.takeover import own_directory
from holdfast.spark_integration.lookup.keys import keys_of
from holdfast.spark_integration.lookup.shown import as_table
from holdfast.spark_integration.lookup.stored_operator import Key
from holdfast.spark_integration.lookup.stored_query import opened_query, sequence_of
from holdfast.spark_integration.processor.state.variable_tables import tables_called
from holdfast.spark_integration.shard.operator_directory import operator_of
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.spark_state.operators import NotKnownError
from holdfast.spark_integration.stored_pointers import configured, stateful_steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)
_SHARDS_AT_ONCE = 4
_REQUESTS_AT_ONCE = 8


def read_state(
    spark: SparkSession,
    checkpoint_location: str | Path,
    operator: str,
    *,
    table: str = "state",
    batchId: int | None = None,
    keys: Key | Sequence[Key] | None = None,
) -> pa.Table:
    """Return the live state of one operator as it was after a micro-batch.

    Parameters
    ----------
    spark : SparkSession
        Its ``spark.holdfast.state.dir`` and ``spark.holdfast.storage.*`` must be those of the query.
    checkpoint_location : str or pathlib.Path
        The query's own ``checkpointLocation``.
    operator : str
        The operator's name.
    table : str, default "state"
        Which of the operator's state tables; or a variable of a processor, by the name that the processor gave it.
        Timers are in the table "timers".
    batchId : int, optional
        The micro-batch, which the query must be able to return to; by default the last committed one.
    keys : mapping, or sequence of mappings, optional
        Return only the rows of these keys, each with a value for every column that the operator is grouped by, such as
        ``{"user": "ann"}``. Reads only what holds them, without Spark if possible: see `holdfast.open_query`, which
        needs no session.

    Returns
    -------
    pyarrow.Table
        One row per key with state, in no particular order: the key columns, then the value columns. A value column
        whose name an earlier column has taken, in whatever case, is named ``value.<name>``.

    Raises
    ------
    InvalidArgumentError
        No state directory is configured, or `checkpoint_location` holds no query with state.
    NotFoundError
        The query has no operator of this name, or the operator no such table; or the micro-batch is not committed, or
        was purged.
    StateLostError, CorruptionError
        An object of the state is missing or damaged.

    Notes
    -----
    The query may keep running. The whole state passes through this process; `holdfast.state` returns a DataFrame
    instead, which executors read.
    """
    settings, options = configured(spark)
    assert settings.state_dir is not None
    if keys is not None:
        try:
            with opened_query(checkpoint_location, settings.state_dir, options) as query:
                return query.get(operator, keys, table=table, batch_id=batchId).popitem()[1]
        except InvalidArgumentError as exc:
            if not isinstance(exc.__cause__, NotKnownError):
                raise
            _log.warning("Spark reads the pointers, so all state is read: %s", exc)
    with open_storage(settings.state_dir, options) as storage:
        try:
            rows = find_pointers(spark, str(checkpoint_location), operator, batchId)
        except (InvalidArgumentError, NotFoundError):
            read_operator(storage, operator)  # a clearer error if no query has an operator of this name
            raise
        parts = [_restore(storage, directory, rows[directory], table) for directory in sorted(rows)]
        schemas = [found for found, _ in parts] or [_empty(storage, operator, table)]
        schema = reduce(evolved, schemas)
    found = [run.projected(schema) for _, runs in parts for run in runs]
    if keys is not None:
        wanted = sequence_of(keys)
        prefixes = keys_of(schema, schema.key.names[: len(wanted[0])] if wanted else schema.key.names, wanted)
        found = [run.with_prefixes(prefixes) for run in found]
    return as_table(schema, found)


Pointers = dict[str, list[PointerRow]]
"""The shards' pointers, by the operator's directory that they name."""


def find_pointers(
    spark: SparkSession, checkpoint_location: str, operator: str, batch_id: int | None = None
) -> Pointers:
    """Return the pointers of an operator; shards without state have none.

    Parameters
    ----------
    batch_id : int, optional
        As of `stateful_steps`.

    Raises
    ------
    InvalidArgumentError, NotFoundError
        There is no such query, operator or micro-batch.
    """
    if batch_id is not None and (type(batch_id) is not int or batch_id < 0):
        raise InvalidArgumentError("a micro-batch is a number, 0 or more", batchId=batch_id)
    steps = stateful_steps(spark, checkpoint_location, batch_id)
    for step in steps:
        ours = {name: of_name for name, of_name in step.pointers.items() if operator_of(name) == operator}
        if ours:
            return ours
    if any(step.is_ours and not step.pointers for step in steps):
        return {}
    raise NotFoundError(
        "the query's checkpoint location holds no pointers to this operator's state: check the operator's name, that "
        "the location is the query's own, and that the query has a state directory",
        operator=operator,
        checkpoint_location=checkpoint_location,
    )


def _restore(
    storage: ObjectStorage, directory: str, rows: list[PointerRow], table: str
) -> tuple[TableSchema, list[Run]]:
    """Return the schema and the live rows of a table in one of the operator's directories."""
    record = read_operator(storage, directory)
    stored = stored_tables(storage, record)
    table = _table_of(stored, table)
    # Two pools: a shard waits for its requests and must not occupy the threads they need.
    with (
        ThreadPoolExecutor(_SHARDS_AT_ONCE) as shards,
        ThreadPoolExecutor(_REQUESTS_AT_ONCE) as requests,
        own_directory() as home,
    ):

        def restore(row: PointerRow) -> list[Run]:
            row.require(record.operator.partition("@")[0], row.shard, record.shards)
            if row.pointer is None:
                return []
            prefix, carried = shard_prefix(directory, row.shard), dict(row.carried_commits)
            log = ObjectCommitLog(storage, prefix, stored.held, requests, home / f"{row.shard}", carried=carried)
            rows = read_tables(log, row.pointer, [table])
            return list(rows.values())

        shown = stored.latest[table]
        return shown, [stored.shown(run, shown) for runs in shards.map(restore, rows) for run in runs]


def _empty(storage: ObjectStorage, operator: str, table: str) -> TableSchema:
    stored = stored_tables(storage, read_operator(storage, operator))
    return stored.latest[_table_of(stored, table)]


def _table_of(stored: StoredTables, name: str) -> str:
    """Return the table of this name, or the one that holds a processor's variable of this name.

    Raises
    ------
    NotFoundError
        There is none.
    """
    found = next((table for table in tables_called(name) if table in stored.held), name)
    find_table(stored.held, found)
    return found
