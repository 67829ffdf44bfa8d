"""Reads the state of a query from outside, as of its last committed micro-batch.

The query may be running or not; nothing of it is changed::

    Spark's checkpoint location          spark.holdfast.checkpoint.dir
        state store ──pointers──▶            <operator>/operator           schemas, number of shards
        (data source "statestore")           <operator>/shard-0003/…       each shard, restored at its pointer

A query may have other stateful steps, so the operator is the one of Spark's state operators whose pointers name its
directory: ``totals``, or ``totals@<query>`` if another query took the name first.
"""

from __future__ import annotations

import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.backends.base import Pointer
from holdfast.backends.evolution import evolved
from holdfast.backends.registry import backend_names
from holdfast.backends.run import Run, TableSchema, merge_runs
from holdfast.backends.schema import find_table
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.settings import Settings
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import read_operator, shard_prefix
from holdfast.snapshotter.ownership.stored_tables import StoredTables, stored_tables
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.hosts.stateful_processor import POINTER_VARIABLE
from holdfast.spark_integration.processor.state.variables import KINDS, table_of
from holdfast.spark_integration.shard.operator_directory import operator_of
from holdfast.spark_integration.shard.pointer_row import POINTER_COLUMNS, PointerRow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Where the hosts keep pointers, by the name of Spark's operator: a column, and the state variable that it is of.
_POINTERS_IN = {
    "applyInPandasWithState": ("value.groupState.*", None),
    "transformWithStateInPandasExec": ("value.*", POINTER_VARIABLE),
}
_SHARDS_AT_ONCE = 4
_REQUESTS_AT_ONCE = 8


def read_state(spark: SparkSession, query_checkpoint: str | Path, operator: str, *, table: str = "state") -> pa.Table:
    """Return all live state of one operator as of the query's last committed micro-batch.

    Parameters
    ----------
    spark : SparkSession
        Its ``spark.holdfast.checkpoint.dir`` and ``spark.holdfast.storage.*`` must be those of the query.
    query_checkpoint : str or pathlib.Path
        The query's own ``checkpointLocation``.
    operator : str
        The operator's name.
    table : str, default "state"
        Which of the operator's state tables; or a variable of a processor, by the name that the processor gave it.
        Timers are in the table "timers".

    Returns
    -------
    pyarrow.Table
        One row per key with state, in no particular order: the key columns, then the value columns. A value column
        whose name is already taken by an earlier column is called ``value.<name>``.

    Raises
    ------
    InvalidArgumentError
        No checkpoint directory is configured, or `query_checkpoint` holds no query with state.
    NotFoundError
        The query has no operator of this name, or the operator no such table.
    StateLostError, CorruptionError
        An object of the state is missing or damaged.

    Notes
    -----
    The query may run meanwhile. The whole state passes through this process.
    """
    settings, options = _configured(spark)
    assert settings.checkpoint_dir is not None
    with open_storage(settings.checkpoint_dir, options) as storage:
        try:
            rows = _find_pointers(spark, str(query_checkpoint), operator)
        except (InvalidArgumentError, NotFoundError):
            read_operator(storage, operator)  # a clearer error if no query has an operator of this name
            raise
        parts = [_restore(storage, directory, rows[directory], table) for directory in sorted(rows)]
        schemas = [found for found, _ in parts] or [_empty(storage, operator, table)]
        schema = reduce(evolved, schemas)
    return _as_table(schema, [run.projected(schema) for _, runs in parts for run in runs])


def _configured(spark: SparkSession) -> tuple[Settings, dict[str, object]]:
    configuration = dict(spark.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    if settings.checkpoint_dir is None:
        raise InvalidArgumentError(
            "only durable state can be read: set spark.holdfast.checkpoint.dir to the directory that the query uses"
        )
    return settings, parse_storage_options(settings.storage_values(configuration))


_Rows = dict[str, list[PointerRow]]
"""The shards' pointers, by the operator's directory that they name."""


def _find_pointers(spark: SparkSession, query_checkpoint: str, operator: str) -> _Rows:
    """Return the pointers of an operator; shards without state have none."""
    spark_versions.start_state_coordinator(spark)
    found = [_read_pointers(spark, query_checkpoint, number, host) for number, host in _hosts(spark, query_checkpoint)]
    for rows in found:
        ours = {name: of_name for name, of_name in rows.items() if operator_of(name) == operator}
        if ours:
            return ours
    if any(not rows for rows in found):
        return {}
    raise NotFoundError(
        "the query's checkpoint location holds no pointers to this operator's state: check the operator's name, that "
        "the location is the query's own, and that the query has a checkpoint directory",
        operator=operator,
        query_checkpoint=query_checkpoint,
    )


def _hosts(spark: SparkSession, query_checkpoint: str) -> list[tuple[int, str]]:
    """Return the numbers and names of Spark's state operators that may hold pointers."""
    from pyspark.errors import PySparkException

    try:
        metadata = spark.read.format("state-metadata").load(query_checkpoint)
        known = metadata.select("operatorId", "operatorName", "operatorProperties").distinct().collect()
    except PySparkException as exc:
        raise _no_query(query_checkpoint) from exc
    if not known:
        raise _no_query(query_checkpoint)
    return sorted({(number, host) for number, host, properties in known if _may_hold_pointers(host, str(properties))})


def _may_hold_pointers(host: str, properties: str) -> bool:
    """Tell whether an operator of Spark's is a host; one with state variables names them in its properties."""
    if host not in _POINTERS_IN:
        return False
    _, variable = _POINTERS_IN[host]
    return variable is None or re.search(rf"\b{variable}\b", properties) is not None


def _no_query(query_checkpoint: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "this is not the checkpoint location of a query with state that has committed a micro-batch",
        query_checkpoint=query_checkpoint,
    )


def _read_pointers(spark: SparkSession, query_checkpoint: str, number: int, host: str) -> _Rows:
    columns, variable = _POINTERS_IN[host]
    source = spark.read.format("statestore").option("operatorId", number)
    if variable is not None:
        source = source.option("stateVarName", variable)
    state = source.load(query_checkpoint).select(columns)
    if state.columns != list(POINTER_COLUMNS):
        return {"": []}  # of another library, or the user's own
    found: _Rows = {}
    for row in map(PointerRow.read, map(tuple, state.collect())):
        found.setdefault(row.directory or "", []).append(row)
    return found


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
        tempfile.TemporaryDirectory(prefix="holdfast-read-") as home,
    ):

        def restore(row: PointerRow) -> list[Run]:
            row.require(record.operator.partition("@")[0], row.shard, record.shards)
            if row.pointer is None:
                return []
            prefix, carried = shard_prefix(directory, row.shard), dict(row.carried_commits)
            log = ObjectCommitLog(storage, prefix, stored.held, requests, Path(home) / f"{row.shard}", carried=carried)
            return read_rows(log, row.pointer, table)

        return stored.latest[table], [run for runs in shards.map(restore, rows) for run in runs]


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
    if name not in stored.held:
        for kind in KINDS:
            if table_of(kind, name) in stored.held:
                return table_of(kind, name)
    find_table(stored.held, name)
    return name


def read_rows(log: ObjectCommitLog, pointer: Pointer, table: str) -> list[Run]:
    """Return the live rows of a table as one run or none, merging a long chain of commits step by step."""
    rows: list[Run] = []
    reached: list[Pointer] = []
    while reached != [pointer]:
        with log.restore(pointer, reached) as restored:
            newer = [restored.runs[table]] if table in restored.runs else []
        rows = [merge_runs([*rows, *newer], drop_deletes=True)] if newer else rows
        reached = [restored.pointer]
    return rows


def _as_table(schema: TableSchema, runs: list[Run]) -> pa.Table:
    names: list[str] = list(schema.key.names)
    for name in schema.value.names:
        free = name
        while free in names:
            free = f"value.{free}"
        names.append(free)
    columns = pa.schema([f.with_name(n) for f, n in zip([*schema.key, *schema.value], names, strict=True)])
    batches = [pa.RecordBatch.from_arrays([*r.keys.columns, *r.values.columns], schema=columns) for r in runs]
    return pa.Table.from_batches(batches, schema=columns)
