"""Makes a savepoint of DataFrames: the initial state of a new query, or an edited copy of another savepoint.

::

    a DataFrame for each table ──▶ pieces                     tasks, one for each shard
    what the base has besides  ──▶ copies                     tasks
    manifest                                                  driver, last

A task sorts the rows of a shard and stores them as pieces (`TableWriter`), or copies pieces of the base byte for byte
(`PieceCopier`), since a savepoint names no other.

A key that stands twice, a null where none may be and a value that its type does not hold are errors that name the key:
nobody could say which of two rows counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast import clock
from holdfast.backends.arrow.rows import HashArray, order_rows
from holdfast.backends.registry import backend_names
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.backends.schema import decode_schemas, encode_schemas
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.settings import Settings
from holdfast.snapshotter.fields import NUMBER_LIMIT
from holdfast.snapshotter.savepoints.manifest import (
    SOURCE,
    Piece,
    SavedOperator,
    SavedQuery,
    SavedSource,
    Savepoint,
    ShardTimes,
)
from holdfast.snapshotter.savepoints.pieces import fetch_piece, write_pieces
from holdfast.snapshotter.savepoints.savepoints import Making, making, read_log, read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.plan.arguments import operator_name
from holdfast.spark_integration.plan.session import shuffle_partitions
from holdfast.spark_integration.savepoints.changes import require_comment, require_counts
from holdfast.spark_integration.savepoints.seeding import PARTITIONS
from holdfast.spark_integration.savepoints.tasks import (
    ShardTask,
    columns_of,
    each_ahead,
    failed,
    run_frame,
    run_tasks,
    versions_of,
)
from holdfast.spark_integration.savepoints.writing.tables import TableRows, edited_tables, tables_of_frames
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE
from holdfast.spark_integration.shard.task import storage_at
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode
from holdfast.spark_integration.spark_state.query_location import NAMED_SOURCES, NAMED_SOURCES_SETTING
from holdfast.spark_integration.timers import TIMERS, first_due_ms, timers_run
from holdfast.spark_integration.ttl.expiry import EXPIRES, NEVER

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from holdfast.spark_integration.savepoints.writing.tables import TableRows

#: What a task returns of each shard: its pieces, when its first timer is due, and which columns have no null.
WRITTEN = "operator string, shard int, pieces string, earliest_ms long, not_null string, error string"
_BEFORE = 2  # hash and shard; in a run, hash and deletion mark


@dataclass(frozen=True)
class WrittenTable:
    """A table that tasks have stored."""

    #: Its own, where `TableSchema.not_null` has the columns without a null, and that of its index
    schemas: Mapping[str, TableSchema]
    pieces: tuple[Piece, ...]  #: Of both, by shard, ascending
    earliest_ms: Mapping[int, int | None]  #: By shard with rows: the earliest time of the index


def write_table(
    rows: TableRows, settings: Settings, target: str, name: str, operator: str, shards: int
) -> WrittenTable:
    """Store the rows of a table as pieces of a savepoint that is not finished.

    `settings`: of the session, without credentials; `target`, `name`: URL of the directory of savepoints, and the
    savepoint's name.
    """
    index = {} if rows.index is None else {rows.index.name: rows.index}
    schemas = {rows.schema.name: rows.schema, **index}
    writer = TableWriter(settings, target, name, operator, encode_schemas(schemas))
    pieces: list[Piece] = []
    earliest_ms: dict[int, int | None] = {}
    not_null: frozenset[str] | None = None
    for row in run_frame(rows.by_shard(shards), writer, WRITTEN):
        found = [Piece.read(piece, "a piece") for piece in json.loads(row["pieces"])]
        pieces += found
        earliest_ms[row["shard"]] = row["earliest_ms"]
        columns = frozenset(json.loads(row["not_null"]))
        not_null = columns if not_null is None else not_null & columns
    places = {table: place for place, table in enumerate(schemas)}
    pieces.sort(key=lambda piece: (places[piece.table], piece.shard))
    # As long as there is no row, none has a null.
    own = replace(
        rows.schema, not_null=frozenset(rows.schema.columns.names[_BEFORE:]) if not_null is None else not_null
    )
    return WrittenTable({own.name: own, **index}, tuple(pieces), earliest_ms)


@dataclass(frozen=True)
class TableWriter:
    """Stores the rows of a task's shards; a function for ``mapInArrow`` over `TableRows.by_shard`."""

    settings: Settings  #: Of the session, without credentials
    target: str  #: URL of the directory of savepoints
    #: Of the savepoint, and of the operator in it
    name: str
    operator: str
    schemas: Mapping[str, list[str]]  #: Encoded: of the table, and of its index, if it has one

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what is stored of each shard.

        Raises `UnavailableError` if a storage did not answer; Spark repeats the task. Other errors are returned:
        repeating would not help.
        """
        found = list(batches)
        if not found:
            return
        rows = pa.Table.from_batches(found).combine_chunks()
        del found
        all_shards = rows.column(1).to_numpy()
        for shard in np.unique(all_shards).tolist():
            mine = all_shards == shard
            own = rows if mine.all() else rows.filter(pa.array(mine)).combine_chunks()
            yield pa.RecordBatch.from_pylist([self._written(shard, own)], schema=columns_of(WRITTEN))

    def _written(self, shard: int, rows: pa.Table) -> dict[str, Any]:
        facts: dict[str, Any] = {"operator": self.operator, "shard": shard}
        try:
            return facts | self._store(shard, rows)
        except HoldfastError as exc:
            return failed(facts, exc)

    def _store(self, shard: int, rows: pa.Table) -> dict[str, Any]:
        folder = savepoint_folder(storage_at(self.target, self.settings), self.name)
        schema, *indexes = decode_schemas(self.schemas).values()
        run = run_of(schema, rows.column(0).to_numpy(), rows.select(range(_BEFORE, rows.num_columns)))
        by_time = [_index_of(run, index) for index in indexes]
        stored = [
            piece.to_json()
            for one in (run, *by_time)
            for piece in write_pieces(folder, self.operator, shard, one, each=each_ahead)
        ]
        due_ms = [first_due_ms(one) for one in by_time if schema.name == TIMERS and len(one)]
        columns = list(zip(schema.columns.names, run.batch.columns, strict=True))[_BEFORE:]
        not_null = [name for name, column in columns if not column.null_count]
        return {
            "pieces": json.dumps(stored),
            "earliest_ms": min(due_ms, default=None),
            "not_null": json.dumps(not_null),
        }


def run_of(schema: TableSchema, hashes: HashArray, rows: pa.Table) -> Run:
    """Return rows as a run. Raises `InvalidArgumentError`, `SchemaMismatchError`.

    `rows`: the key columns and the value columns in the order of the schema, whatever their names.
    """
    width = len(schema.key)
    named = [rows.select(range(width)), rows.select(range(width, rows.num_columns))]
    key_rows, values = (
        part.rename_columns(side.names) for part, side in zip(named, (schema.key, schema.value), strict=True)
    )
    keys = Keys.of(schema, hashes, key_rows)
    run = Run.build(schema, keys, schema.conform(values, "value", keys))
    if len(run) < len(keys):
        order = order_rows(keys.hashes, keys.columns)
        twice = keys.shown(int(order.rows[~order.first][0]))
        raise InvalidArgumentError("a key occurs twice: give each key one row", table=schema.name, key=twice)
    return run


def _index_of(run: Run, index: TableSchema) -> Run:
    """Return the table that has the keys of a run in the order of their times."""
    times = _times_of(run)
    rows = np.flatnonzero(pc.is_valid(times).to_numpy(zero_copy_only=False))
    if len(rows) < len(run) and run.schema.name == TIMERS:
        raise InvalidArgumentError("a timer has no time: leave its row out", table=TIMERS)
    keys = run.keys.select(range(len(index.key)))
    due_ms = times.take(pa.array(rows)).to_numpy()
    if len(due_ms) and not -NUMBER_LIMIT < due_ms.min() <= due_ms.max() < NUMBER_LIMIT:
        raise InvalidArgumentError("times must be milliseconds since 1970, below 2^62", table=run.schema.name)
    return timers_run(index, Keys(run.hashes, keys).take(rows), due_ms)


def _times_of(run: Run) -> pa.Array:
    """Return the time of each row of a table in its index; null if the index lacks it."""
    if run.schema.name != TIMERS:
        expires_ms = run.values.column(EXPIRES)
        return pc.if_else(pc.equal(expires_ms, NEVER), None, expires_ms)
    if len(run.schema.value):
        return run.values.column(0)  # one timer for each key
    return run.keys.column(run.keys.num_columns - 1)  # any number of them


def copy_pieces(
    spark: SparkSession, settings: Settings, target: str, base: str, name: str, pieces: Sequence[tuple[str, Piece]]
) -> None:
    """Copy pieces of a savepoint, each under its key. Raises `CorruptionError` if one is missing or damaged.

    `settings`: of the session, without credentials.
    """
    rows = [(operator, piece.shard, json.dumps(piece.to_json())) for operator, piece in pieces]
    copier = PieceCopier(settings, target, base, name)
    run_tasks(spark, rows, copier.GIVEN, copier, copier.RETURNED)


@dataclass(frozen=True)
class PieceCopier(ShardTask):
    """Copies the pieces of a task; see `copy_pieces` and `ShardTask`."""

    GIVEN: ClassVar[str] = "operator string, shard int, piece string"
    RETURNED: ClassVar[str] = "operator string, shard int, error string"

    base: str
    name: str

    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[dict[str, Any]]:
        before, after = (savepoint_folder(opened(self.target), name) for name in (self.base, self.name))
        piece = Piece.read(json.loads(row["piece"]), "a piece")
        after.put(piece.key, fetch_piece(before, piece)[0])
        yield {"operator": row["operator"], "shard": row["shard"]}


def write(
    tables: DataFrame | Mapping[str, DataFrame],
    target: str | Path,
    name: str,
    operator: str,
    *,
    keys: str | Column | Sequence[str | Column],
    timeMode: TimeMode = "None",
    expiring: Collection[str] = (),
    shards: int | None = None,
    sources: int | Sequence[str] = 1,
    comment: str = "",
) -> Savepoint:
    """Make a savepoint from DataFrames: the initial state of a new query.

    The query has one stateful operator, ``applyInArrowWithState`` or ``applyInPandasWithState``; a processor has
    ``initialState`` instead. Its sources begin where their own options say.

    Parameters
    ----------
    tables : DataFrame, or mapping of str to DataFrame
        One row per key: the key columns and the state's. A single DataFrame is the table "state". In "timers" a column
        ``due_ms`` (of timers in processing time ``due_processing_ms``) has the time in ms since 1970.
    target : str or pathlib.Path
        The directory of savepoints.
    name : str
        The savepoint's name.
    operator : str
        Its name in the query.
    keys : str, Column, or sequence of these
        As for the operator's ``groupBy``, and of the same types.
    timeMode : {"None", "ProcessingTime", "EventTime"}
        The clock of its timers, or of its timeouts.
    expiring : collection of str
        Tables with a time to live: their bigint column ``expires_ms`` says when a row expires, in ms since 1970; null
        for never.
    shards : int, optional
        By default ``spark.holdfast.shards``, or as many as Spark has shuffle partitions.
    sources : int or sequence of str
        How many sources the query reads, or their names, if it names them.
    comment : str
        A comment to show with the savepoint.

    Returns
    -------
    Savepoint

    Raises
    ------
    InvalidArgumentError
        An argument, a column or a type is wrong; a key occurs twice.
    SchemaMismatchError
        A value cannot be stored without loss.
    ConflictError
        There is a savepoint of this name, or somebody else has begun one since.

    Notes
    -----
    A task holds the rows of one shard, up to three times. Spark may compute a DataFrame more than once: it should yield
    the same rows.
    """
    require_comment(comment)
    require_counts(shards=shards)
    frames = dict(tables) if isinstance(tables, Mapping) else {STATE_TABLE: tables}
    rows = tables_of_frames(frames, _as_list(keys), _known(timeMode), expiring)
    with _begun(frames, target, name) as (writer, _, new):
        count = shards or writer.settings.shards or shuffle_partitions(writer.spark)
        query, versions = _no_query(sources, count), versions_of(writer.spark)
        empty = without_rows(operator_name(None, operator), 0, GROUP_STATE, count, has_timeout=timeMode != "None")
        made = Savepoint(name, comment, clock.now_ms(), versions, query, (writer.written(empty, rows),))
        new.finish(made)
    return made


def edit(
    tables: DataFrame | Mapping[str, DataFrame],
    target: str | Path,
    base: str,
    name: str,
    operator: str | None = None,
    *,
    comment: str = "",
) -> Savepoint:
    """Make a copy of a savepoint in which some tables of an operator differ.

    Parameters
    ----------
    tables : DataFrame, or mapping of str to DataFrame
        By table all of its rows, with the columns that `holdfast.savepoints.load` shows; a DataFrame is the table
        "state". Its indexes, such as the order in which timers are due, are derived from it.
    target : str or pathlib.Path
        The directory of both savepoints.
    base : str
        The savepoint from which the rest is copied, including the positions of sources.
    name : str
        The new savepoint's name.
    operator : str, optional
        Required if the base has several.
    comment : str
        A comment to show with the savepoint.

    Returns
    -------
    Savepoint

    Raises
    ------
    NotFoundError
        There is no such base, or no such operator in it.
    CorruptionError
        A part of the base is damaged.
    InvalidArgumentError, SchemaMismatchError, ConflictError
        As of `write`.
    """
    require_comment(comment)
    frames = dict(tables) if isinstance(tables, Mapping) else {STATE_TABLE: tables}
    with _begun(frames, target, name) as (writer, targets, new):
        read = read_savepoint(targets, base)
        edited = read.find_operator(operator)
        rows = edited_tables(frames, edited.tables)
        _copy_rest(writer, read, edited, rows, (savepoint_folder(targets, base), new.folder))
        operators = tuple(writer.written(one, rows) if one is edited else one for one in read.operators)
        made = replace(
            read,
            name=name,
            comment=comment,
            created_ms=clock.now_ms(),
            versions=versions_of(writer.spark),
            operators=operators,
        )
        new.finish(made)
    return made


def without_rows(
    name: str,
    number: int,
    host: str,
    shards: int,
    *,
    has_timeout: bool = False,
    configuration: Mapping[str, str] = MappingProxyType({}),
) -> SavedOperator:
    """Return an operator to which tables can be written."""
    return SavedOperator(name, number, host, has_timeout, shards, {}, {}, True, configuration, (), ())


@contextmanager
def _begun(
    frames: Mapping[str, DataFrame], target: str | Path, name: str
) -> Iterator[tuple[TableSetWriter, ObjectStorage, Making]]:
    """Give what writes tables into a new savepoint, the directory of savepoints, and the savepoint in the making."""
    if not frames:
        raise InvalidArgumentError("name at least one table to write")
    spark = next(iter(frames.values())).sparkSession
    configuration = dict(spark.conf.getAll)
    settings = Settings.parse(configuration, backend_names())
    options = parse_storage_options(settings.storage_values(configuration))
    with open_storage(str(target), options) as targets:
        yield TableSetWriter(spark, settings, str(target), name), targets, making(targets, name)


def _as_list(keys: str | Column | Sequence[str | Column]) -> Sequence[str | Column]:
    return keys if isinstance(keys, Sequence) and not isinstance(keys, str) else [keys]


def _known(time_mode: TimeMode) -> TimeMode:
    if time_mode not in TIMEOUT_CONF:
        raise InvalidArgumentError(f"timeMode must be one of {', '.join(map(repr, TIMEOUT_CONF))}", given=time_mode)
    return time_mode


@dataclass(frozen=True)
class TableSetWriter:
    """Writes the tables of an operator into a savepoint that is not finished."""

    spark: SparkSession
    settings: Settings  #: Of the session, without credentials
    #: URL of the directory of savepoints, and the savepoint's name
    target: str
    name: str

    def written(self, operator: SavedOperator, tables: Sequence[TableRows]) -> SavedOperator:
        """Return an operator with these tables in place of those it has of their names."""
        schemas, pieces = dict(operator.tables), list(operator.pieces)
        earliest_ms: dict[int, int | None] = {times.shard: times.earliest_timer_ms for times in operator.times}
        for rows in tables:
            found = write_table(rows, self.settings, self.target, self.name, operator.name, operator.shards)
            schemas |= found.schemas
            pieces = [piece for piece in pieces if piece.table not in found.schemas]
            pieces += found.pieces
            for shard, due_ms in found.earliest_ms.items():
                known = [ms for ms in (earliest_ms.get(shard), due_ms) if ms is not None]
                earliest_ms[shard] = min(known, default=None)
        places = {table: place for place, table in enumerate(schemas)}
        pieces.sort(key=lambda piece: (places[piece.table], piece.shard))
        # The times of the last calls say what was evicted before them: of rows that are written here, nothing is known.
        times = tuple(ShardTimes(shard, due_ms, 0) for shard, due_ms in sorted(earliest_ms.items()))
        declared = operator.declared or schemas
        return replace(operator, tables=schemas, declared=declared, times=times, pieces=tuple(pieces))


def _no_query(sources: int | Sequence[str], partitions: int) -> SavedQuery:
    """Return what a savepoint says of a query that has not begun: each source is at its own beginning."""
    named = isinstance(sources, Sequence)
    names = []
    if isinstance(sources, Sequence) and not isinstance(sources, str):
        names = [str(name) for name in sources]
    elif type(sources) is int:
        names = [f"{number}" for number in range(sources)]
    if not names or len(set(names)) < len(names) or not all(map(SOURCE.fullmatch, names)):
        raise InvalidArgumentError(
            "sources is a number, at least 1, or a list of names of letters, digits and underscores", sources=sources
        )
    conf = {PARTITIONS: f"{partitions}"} | ({NAMED_SOURCES_SETTING: "true"} if named else {})
    batch = {"batchWatermarkMs": 0, "batchTimestampMs": clock.now_ms(), "conf": conf}
    positions = tuple(SavedSource(name, "-", ()) for name in names)
    return SavedQuery("", 0, NAMED_SOURCES if named else "v1", json.dumps(batch), 0, positions)


def _copy_rest(
    writer: TableSetWriter,
    base: Savepoint,
    edited: SavedOperator,
    rows: Sequence[TableRows],
    folders: tuple[PrefixedStorage, PrefixedStorage],
) -> None:
    """Copy from the first folder to the second all of a savepoint but some tables of an operator."""
    replaced = {schema.name for table in rows for schema in (table.schema, table.index) if schema is not None}
    kept = [
        (operator.name, piece)
        for operator in base.operators
        for piece in operator.pieces
        if operator is not edited or piece.table not in replaced
    ]
    copy_pieces(writer.spark, writer.settings, writer.target, base.name, writer.name, kept)
    for log in base.query.logs:
        folders[1].put(log.key, read_log(folders[0], log))
