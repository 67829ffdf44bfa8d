"""Read the state of a query from outside: what its last committed micro-batch left.

Nothing of the query is touched, whether it runs or not::

    Spark's checkpoint location          spark.holdfast.checkpoint.dir
        state store ──pointers──▶            <operator>/operator           schemas, number of shards
        (data source "statestore")           <operator>/shard-0003/…       each shard, restored at its pointer

A query may have other stateful steps, so Spark's state operators are looked through for the one whose
pointers name commits of this operator; commit ids are random, so one shard decides.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.backends import stored_file
from holdfast.backends.base import Pointer
from holdfast.backends.registry import backend_names
from holdfast.backends.run import Run, TableSchema, merge_runs
from holdfast.errors import InvalidArgumentError, NotFoundError
from holdfast.settings import Settings
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.operator_record import OperatorRecord, decode_schemas, read_operator, shard_prefix
from holdfast.snapshotter.storage import ObjectStorage, open_storage, parse_storage_options
from holdfast.spark_integration.pointer_row import POINTER_COLUMNS, PointerRow
from holdfast.spark_integration.routes import choose_routes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SPARK_OPERATOR = "applyInPandasWithState"
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
        Which of the operator's state tables.

    Returns
    -------
    pyarrow.Table
        One row for each key that has state, in no particular order: the key columns, then the value columns. A value
        column whose name is already taken by a column before it is called ``value.<name>``.

    Raises
    ------
    InvalidArgumentError
        No checkpoint directory is configured, or `query_checkpoint` holds no query with state.
    NotFoundError
        The query has no operator, or the operator no table, of this name.
    StateLostError, CorruptionError
        An object of the state is missing or damaged.

    Notes
    -----
    The query may run meanwhile. The whole state passes through this process.
    """
    settings, options = _configured(spark)
    assert settings.checkpoint_dir is not None
    with open_storage(settings.checkpoint_dir, options) as storage:
        record = read_operator(storage, operator)
        schemas = decode_schemas(record.schemas)
        if table not in schemas:
            raise NotFoundError("the operator has no such table", operator=operator, table=table, tables=list(schemas))
        pointers = _find_pointers(spark, str(query_checkpoint), storage, record)
        runs = _restore(storage, record, schemas, pointers, table)
    return _as_table(schemas[table], runs)


def _configured(spark: SparkSession) -> tuple[Settings, dict[str, object]]:
    configuration = dict(spark.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    if settings.checkpoint_dir is None:
        raise InvalidArgumentError(
            "state can be read only where it is durable: set spark.holdfast.checkpoint.dir to the directory that "
            "the query uses"
        )
    return settings, parse_storage_options(settings.storage_values(configuration))


@dataclass(frozen=True)
class _StateOperator:
    """One of Spark's state operators, and by shard the pointer it holds and the commit carried with it."""

    number: int
    pointers: dict[int, PointerRow]


def _find_pointers(
    spark: SparkSession, query_checkpoint: str, storage: ObjectStorage, record: OperatorRecord
) -> dict[int, PointerRow]:
    """Return the rows of the operator's pointers by shard; shards without state have none."""
    found = list(_state_operators(spark, query_checkpoint, record.shards))
    for candidate in found:
        first = next(iter(candidate.pointers.items()), None)
        if first is not None and _is_of(storage, shard_prefix(record.operator, first[0]), first[1]):
            return candidate.pointers
    if any(not candidate.pointers for candidate in found):
        return {}
    raise NotFoundError(
        "the query's checkpoint location holds no pointers to this operator's state: check that it is the query's "
        "own, and that spark.holdfast.checkpoint.dir is the one that the query uses",
        operator=record.operator,
        query_checkpoint=query_checkpoint,
        storage=storage.url,
    )


def _state_operators(spark: SparkSession, query_checkpoint: str, shards: int) -> Iterator[_StateOperator]:
    from pyspark.errors import PySparkException

    try:
        metadata = spark.read.format("state-metadata").load(query_checkpoint)
        known = metadata.select("operatorId", "operatorName", "numPartitions").distinct().collect()
    except PySparkException as exc:
        raise _no_query(query_checkpoint) from exc
    if not known:
        raise _no_query(query_checkpoint)
    for row in sorted(known):
        if row["operatorName"] == _SPARK_OPERATOR:
            routes = {route: shard for shard, route in enumerate(choose_routes(shards, row["numPartitions"]))}
            yield _StateOperator(row["operatorId"], _read_pointers(spark, query_checkpoint, row["operatorId"], routes))


def _no_query(query_checkpoint: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "this is not the checkpoint location of a query with state that has committed a micro-batch",
        query_checkpoint=query_checkpoint,
    )


def _read_pointers(
    spark: SparkSession, query_checkpoint: str, number: int, routes: dict[int, int]
) -> dict[int, PointerRow]:
    source = spark.read.format("statestore").option("operatorId", number)
    state = source.load(query_checkpoint).select("key.*", "value.groupState.*")
    if state.columns[1:] != POINTER_COLUMNS:
        return {}  # of another library, or the user's own
    return {routes[row[0]]: PointerRow.read(tuple(row[1:])) for row in state.collect() if row[0] in routes}


def _is_of(storage: ObjectStorage, shard: str, row: PointerRow) -> bool:
    """Tell whether a pointer is one of this operator's: its commit names the shard, or lies there."""
    pointer = row.pointer
    try:
        data = storage.get(f"{shard}/commits/{pointer}") if row.carried is None else row.carried
    except NotFoundError:
        return False
    commit = stored_file.decode(data, source=f"the commit {pointer} of {shard}", kind="commit")
    return bool(commit.header.get("shard") == shard)


def _restore(
    storage: ObjectStorage,
    record: OperatorRecord,
    schemas: dict[str, TableSchema],
    pointers: dict[int, PointerRow],
    table: str,
) -> list[Run]:
    # Two pools: a shard waits for its requests, and must not take the threads they need.
    with (
        ThreadPoolExecutor(_SHARDS_AT_ONCE) as shards,
        ThreadPoolExecutor(_REQUESTS_AT_ONCE) as requests,
        tempfile.TemporaryDirectory(prefix="holdfast-read-") as home,
    ):

        def restore(shard: int) -> list[Run]:
            prefix = shard_prefix(record.operator, shard)
            row = pointers[shard]
            carried = dict(row.carried_commits)
            log = ObjectCommitLog(storage, prefix, schemas, requests, Path(home) / f"{shard}", carried=carried)
            return read_rows(log, row.pointer, table)

        return [run for runs in shards.map(restore, sorted(pointers)) for run in runs]


def read_rows(log: ObjectCommitLog, pointer: Pointer, table: str) -> list[Run]:
    """Return the live rows of a table, in one run or none; a long chain of commits is merged step by step."""
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
