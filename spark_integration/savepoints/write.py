"""Creates a savepoint from DataFrames: a new query's initial state, or an edited copy of a savepoint.

::

    a DataFrame per table      ──▶ pieces                     tasks, one per shard
    the rest of the base       ──▶ copies                     tasks
    manifest                                                  driver, last

    carrier   n         ──▶   hash   shard   carrier   n     ═shuffle═▶  one task per shard
    "AA"      42              …      3       "AA"      42

The hash is Spark's ``xxhash64`` of the grouping columns, as a query computes it. An index, such as timers by due time,
is derived from its table.

A task sorts a shard's rows and stores them as pieces (`TableWriter`), or copies the base's pieces byte for byte
(`PieceCopier`), since savepoints never share files.

A duplicate key, a forbidden null or a value outside its type's range is an error that includes the key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, StructType

from holdfast import clock
from holdfast.backends.arrow.rows import HashArray, order_rows
from holdfast.backends.run import Keys, Run
from holdfast.backends.schema import TableSchema
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
from holdfast.snapshotter.savepoints.savepoints import (
    SavepointWriter,
    begin_savepoint,
    fetch_piece,
    read_log,
    read_savepoint,
    savepoint_folder,
    write_pieces,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.lookup.keys import free_name, shown_columns
from holdfast.spark_integration.plan.arguments import operator_name
from holdfast.spark_integration.plan.grouping_keys import Grouping, resolve_keys
from holdfast.spark_integration.plan.session import shuffle_partitions
from holdfast.spark_integration.processor.state.variable_tables import find_shown, grouping_columns, is_of_entry
from holdfast.spark_integration.savepoints.changes import require_comment, require_counts
from holdfast.spark_integration.savepoints.new_query import PARTITIONS
from holdfast.spark_integration.savepoints.tasks import (
    ShardTask,
    columns_of,
    each_ahead,
    failed,
    run_frame,
    run_tasks,
    settings_of,
    versions_of,
)
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE
from holdfast.spark_integration.shard.task import storage_at
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode
from holdfast.spark_integration.spark_state.query_location import NAMED_SOURCES, NAMED_SOURCES_SETTING
from holdfast.spark_integration.spark_types import arrow_schema, types_of_keys
from holdfast.spark_integration.timers import TIMERS, TIMERS_BY_DUE, KeyTimers, first_due_ms, timers_run
from holdfast.spark_integration.transport.packed import quoted
from holdfast.spark_integration.transport.routes import route_column, shard_column
from holdfast.spark_integration.ttl.ends import due_of
from holdfast.spark_integration.ttl.expiry import EXPIRES, NEVER, expiring_tables, index_of
from holdfast.spark_integration.vectorised.arrow_with_state import require_table_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

HASH, SHARD = "hash", "shard"
#: A task's result for a shard: its pieces, its first timer's due time, and the columns without nulls.
WRITTEN = "operator string, shard int, pieces string, earliest_ms long, not_null string, error string"
_LEADING = 2  # columns before the keys: hash and shard; in a run, hash and deletion mark


@dataclass(frozen=True)
class RowEnds:
    """When a one-line operator's rows end: a delay after a column's time, or never if that is null."""

    column: str  #: Its name in runs
    after_us: int = 0

    def due_ms(self, run: Run) -> pa.Array:
        """Return each row's end for the index; null for never."""
        at = run.batch.column(self.column)
        end_us = at.cast(pa.timestamp("us", at.type.tz)).cast(pa.int64()).fill_null(0).to_numpy() + self.after_us
        return pc.if_else(at.is_valid(), pa.array(due_of(end_us)), pa.scalar(None, pa.int64()))


@dataclass(frozen=True)
class TableRows:
    """A table's rows as a DataFrame."""

    schema: TableSchema
    frame: DataFrame  #: Key columns, then value columns, in schema order; names are ignored
    grouping: int  #: The number of leading key columns by which the operator groups
    index: TableSchema | None = None  #: Schema of the table that orders the keys by time
    ends: RowEnds | None = None  #: The source of that time, for a one-line operator

    def by_shard(self, shards: int) -> DataFrame:
        """Prepend hash and shard to the rows; each shard gets its own partition."""
        names = [f"c{place}" for place in range(len(self.frame.columns))]
        frame = self.frame.toDF(*names)
        hashed = frame.select(F.xxhash64(*names[: self.grouping]).alias(HASH), *names)
        routed = hashed.repartition(shards, route_column(F.col(HASH), shards))
        return routed.select(HASH, shard_column(F.col(HASH), shards).alias(SHARD), *names)


def tables_of_frames(
    frames: Mapping[str, DataFrame], keys: Sequence[str | Column], time_mode: TimeMode, expiring: Collection[str] = ()
) -> list[TableRows]:
    """Return a new operator's tables, derived from these frames."""
    found: list[TableRows] = []
    key_types: pa.Schema | None = None
    for name, frame in frames.items():
        if name != TIMERS:
            require_table_name(name)
        grouping = resolve_keys(frame, keys)
        types = types_of_keys([key.field for key in grouping.keys])
        if key_types is not None and not key_types.equals(types):
            raise InvalidArgumentError("all tables of an operator need the same keys", table=name, keys=types.names)
        key_types = types
        if name == TIMERS:
            found.append(_timers(frame, grouping, types, time_mode))
        else:
            found.append(_state(name, frame, grouping, types, expires=name in expiring))
    unknown = set(expiring) - (frames.keys() - {TIMERS})
    if unknown:
        raise InvalidArgumentError("expiring names a table that is not written", table=min(unknown))
    if time_mode != "None" and TIMERS not in frames:
        table, grouping_columns = found[0], found[0].frame.columns[: found[0].grouping]
        own = KeyTimers.tables(table.schema.key, TIMEOUT_CONF[time_mode])
        none = table.frame.select(*map(quoted, grouping_columns), F.lit(0).cast("long")).limit(0)
        found.append(TableRows(own[TIMERS], none, table.grouping, own[TIMERS_BY_DUE]))
    return found


def _state(name: str, frame: DataFrame, grouping: Grouping, key_types: pa.Schema, *, expires: bool) -> TableRows:
    values = [value for value in _value_names(frame, grouping) if not (expires and value == EXPIRES)]
    if not values:
        raise InvalidArgumentError("a state table needs a column besides its keys", table=name)
    own = arrow_schema(StructType([frame.schema[value] for value in values]), name)
    if not expires:
        return TableRows(TableSchema.of(name, key_types, own), _selected(frame, grouping, values), len(key_types))
    if EXPIRES not in frame.columns or not isinstance(frame.schema[EXPIRES].dataType, LongType):
        raise InvalidArgumentError(f"a table whose rows expire needs a bigint column {EXPIRES}", table=name)
    tables = expiring_tables(name, key_types, own)
    return TableRows(
        tables[name], _selected(frame, grouping, [*values, EXPIRES]), len(key_types), tables[index_of(name)]
    )


def _timers(frame: DataFrame, grouping: Grouping, key_types: pa.Schema, time_mode: TimeMode) -> TableRows:
    if time_mode == "None":
        raise InvalidArgumentError("timers need a clock: timeMode must be ProcessingTime or EventTime")
    tables = KeyTimers.tables(key_types, TIMEOUT_CONF[time_mode])
    values, expected = _value_names(frame, grouping), tables[TIMERS].value.names
    if values != expected:
        raise InvalidArgumentError(
            "a table of timers has the keys and one column of due times", columns=values, expected=expected
        )
    return TableRows(tables[TIMERS], _selected(frame, grouping, values), len(key_types), tables[TIMERS_BY_DUE])


def _value_names(frame: DataFrame, grouping: Grouping) -> list[str]:
    keys = {key.column for key in grouping.keys}
    return [name for name in frame.columns if name not in keys]


def _selected(frame: DataFrame, grouping: Grouping, values: list[str]) -> DataFrame:
    return frame.select(*[key.expression for key in grouping.keys], *map(quoted, values))


def edited_tables(frames: Mapping[str, DataFrame], tables: Mapping[str, TableSchema]) -> list[TableRows]:
    """Return an operator's replacement tables from frames in the format of `holdfast.savepoints.load`."""
    found = []
    for name, frame in frames.items():
        table = find_shown(tables, name)
        shown = shown_columns(tables[table]).names
        shard = free_name(SHARD, shown, "_")  # the column name that `load` uses
        given = [column for column in frame.columns if column != shard]
        if sorted(given) != sorted(shown):
            raise InvalidArgumentError(
                "the columns differ from those of the stored table", table=name, columns=given, expected=shown
            )
        places = [f"c{place}" for place in range(len(frame.columns))]
        selected = frame.toDF(*places).select(*[places[frame.columns.index(column)] for column in shown])
        _require_same_keys(tables[table], selected)
        index = TIMERS_BY_DUE if table == TIMERS else index_of(table)
        found.append(TableRows(tables[table], selected, grouping_width(tables[table], tables), tables.get(index)))
    return found


def _require_same_keys(table: TableSchema, frame: DataFrame) -> None:
    """Check the key types, because a number's hash depends on its type."""
    fields = StructType(frame.schema.fields[: len(table.key)])
    given = TableSchema.of(table.name, arrow_schema(fields, table.name), pa.schema([])).key
    differ = [
        f"{own.name}: {own.type} → {other.type}"
        for own, other in zip(table.key, given, strict=True)
        if own.type != other.type
    ]
    if differ:
        raise InvalidArgumentError(
            "the keys have different types than the stored ones", table=table.name, changed=differ
        )


def grouping_width(table: TableSchema, tables: Mapping[str, TableSchema]) -> int:
    """Return the number of grouping columns, which precede list elements' numbers and map entries' keys."""
    known = grouping_columns(tables, table.name)
    if known:
        return len(known)
    width = next(place for place, name in enumerate(table.key.names) if is_of_entry(name))
    if not width:
        raise InvalidArgumentError(
            "cannot tell by which of the key columns the operator groups: rename those that begin with 'entry.'",
            table=table.name,
            keys=table.key.names,
        )
    return width


@dataclass(frozen=True)
class TableWriter:
    """Stores the rows of a task's shards; a function for ``mapInArrow`` over `TableRows.by_shard`."""

    settings: Settings  #: The session's, without credentials
    target: str  #: URL of the savepoint directory
    #: The savepoint's name, its maker's id, and the operator's name
    name: str
    maker: str
    operator: str
    tables: Sequence[TableSchema]  #: The table and its index, if any
    ends: RowEnds | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield each shard's result, or an error that a retry would not cure. Raises `UnavailableError`."""
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
        schema, *indexes = self.tables
        run = run_of(schema, rows.column(0).to_numpy(), rows.select(range(_LEADING, rows.num_columns)))
        by_time = [_index_of(run, index, self.ends) for index in indexes]
        stored = [
            piece.to_json()
            for one in (run, *by_time)
            for piece in write_pieces(folder, self.operator, shard, one, maker=self.maker, each=each_ahead)
        ]
        wakes = schema.name == TIMERS or self.ends is not None
        due_ms = [first_due_ms(one) for one in by_time if wakes and len(one)]
        columns = list(zip(schema.columns.names, run.batch.columns, strict=True))[_LEADING:]
        not_null = [name for name, column in columns if not column.null_count]
        return {
            "pieces": json.dumps(stored),
            "earliest_ms": min(due_ms, default=None),
            "not_null": json.dumps(not_null),
        }


def run_of(schema: TableSchema, hashes: HashArray, rows: pa.Table) -> Run:
    """Return rows with columns in schema order as a run. Raises `InvalidArgumentError`, `SchemaMismatchError`."""
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


def _index_of(run: Run, index: TableSchema, ends: RowEnds | None) -> Run:
    """Return the index of a run: its keys ordered by time."""
    times = _times_of(run) if ends is None else ends.due_ms(run)
    rows = np.flatnonzero(pc.is_valid(times).to_numpy(zero_copy_only=False))
    if len(rows) < len(run) and run.schema.name == TIMERS:
        raise InvalidArgumentError("a timer has no due time: leave its row out", table=TIMERS)
    keys = run.keys.select(range(len(index.key)))
    due_ms = times.take(pa.array(rows)).to_numpy()
    if len(due_ms) and not -NUMBER_LIMIT < due_ms.min() <= due_ms.max() < NUMBER_LIMIT:
        raise InvalidArgumentError("times must be milliseconds since 1970, below 2^62", table=run.schema.name)
    return timers_run(index, Keys(run.hashes, keys).take(rows), due_ms)


def _times_of(run: Run) -> pa.Array:
    """Return each row's time in the index; null for a row without an index entry."""
    if run.schema.name != TIMERS:
        expires_ms = run.values.column(EXPIRES)
        return pc.if_else(pc.equal(expires_ms, NEVER), None, expires_ms)
    if len(run.schema.value):
        return run.values.column(0)  # one timer per key
    return run.keys.column(run.keys.num_columns - 1)  # any number of timers per key


@dataclass(frozen=True)
class PieceCopier(ShardTask):
    """Copies pieces from one savepoint to another, under the same keys; see `ShardTask`."""

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
    ``initialState`` instead. Its sources start where their options say.

    Parameters
    ----------
    tables : DataFrame, or mapping of str to DataFrame
        One row per key: key columns and state columns. A lone DataFrame is the table "state". The table "timers" has a
        column ``due_ms`` (``due_processing_ms`` for processing-time timers) in ms since 1970.
    target : str or pathlib.Path
        The directory of savepoints.
    name : str
        The savepoint's name.
    operator : str
        The operator's name in the query.
    keys : str, Column, or sequence of these
        The keys of the operator's ``groupBy``, with the same types.
    timeMode : {"None", "ProcessingTime", "EventTime"}
        The clock of the operator's timers or timeouts.
    expiring : collection of str
        Tables with a time to live: their bigint column ``expires_ms`` holds a row's expiry time in ms since 1970; null
        for never.
    shards : int, optional
        Defaults to ``spark.holdfast.shards``, else to the number of shuffle partitions.
    sources : int or sequence of str
        The number of sources that the query reads, or their names if the query names them.
    comment : str
        A comment shown with the savepoint.

    Raises
    ------
    InvalidArgumentError
        An argument, a column or a type is wrong; a key occurs twice.
    SchemaMismatchError
        A value cannot be stored without loss.
    ConflictError
        A savepoint of this name exists, or another process has begun one since.

    Notes
    -----
    A task needs memory for up to three copies of a shard's rows. Spark may compute a DataFrame more than once, so it
    should yield the same rows each time.
    """
    require_comment(comment)
    require_counts(shards=shards)
    if timeMode not in TIMEOUT_CONF:
        raise InvalidArgumentError(f"timeMode must be one of {', '.join(map(repr, TIMEOUT_CONF))}", given=timeMode)
    frames = dict(tables) if isinstance(tables, Mapping) else {STATE_TABLE: tables}
    grouping = keys if isinstance(keys, Sequence) and not isinstance(keys, str) else [keys]
    rows = tables_of_frames(frames, grouping, timeMode, expiring)
    with _begun(frames, target, name) as (writer, _, new):
        count = shards or writer.settings.shards or shuffle_partitions(writer.spark)
        query, versions = _no_query(sources, count), versions_of(writer.spark)
        empty = SavedOperator(operator_name(None, operator), 0, GROUP_STATE, timeMode != "None", count)
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
    """Copy a savepoint and replace some tables of an operator.

    Parameters
    ----------
    tables : DataFrame, or mapping of str to DataFrame
        All rows of each table, with the columns of `holdfast.savepoints.load`; a lone DataFrame is the table "state".
        Indexes, such as timers by due time, are derived from the tables.
    target : str or pathlib.Path
        The savepoint directory, for both savepoints.
    base : str
        The savepoint that supplies everything else, including source positions.
    operator : str, optional
        Required if the base has several operators.
    name, comment
        As in `write`, which also lists further errors.

    Raises
    ------
    NotFoundError
        The base, or the operator in it, does not exist.
    CorruptionError
        A part of the base is damaged.
    """
    require_comment(comment)
    frames = dict(tables) if isinstance(tables, Mapping) else {STATE_TABLE: tables}
    with _begun(frames, target, name) as (writer, targets, new):
        read = read_savepoint(targets, base)
        edited = read.find_operator(operator)
        rows = edited_tables(frames, edited.tables)
        replaced = {schema.name for table in rows for schema in (table.schema, table.index) if schema is not None}
        kept = [
            (operator.name, piece.shard, json.dumps(piece.to_json()))
            for operator in read.operators
            for piece in operator.pieces
            if operator is not edited or piece.table not in replaced
        ]
        run_tasks(writer.spark, kept, PieceCopier(writer.settings, writer.target, base, name))
        for log in read.query.logs:
            new.folder.put(log.key, read_log(savepoint_folder(targets, base), log))
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


@contextmanager
def _begun(
    frames: Mapping[str, DataFrame], target: str | Path, name: str
) -> Iterator[tuple[TableSetWriter, ObjectStorage, SavepointWriter]]:
    """Begin a savepoint; yield a writer of tables, the savepoint directory's storage, and the savepoint's writer."""
    if not frames:
        raise InvalidArgumentError("name at least one table to write")
    spark = next(iter(frames.values())).sparkSession
    settings, options = settings_of(spark)
    with open_storage(str(target), options) as targets:
        new = begin_savepoint(targets, name)
        yield TableSetWriter(spark, settings, str(target), name, new.id), targets, new


@dataclass(frozen=True)
class TableSetWriter:
    """Writes an operator's tables into an unfinished savepoint."""

    spark: SparkSession
    settings: Settings  #: Of the session, without credentials
    #: URL of the savepoint directory, the savepoint's name, and its maker's id
    target: str
    name: str
    maker: str

    def written(self, operator: SavedOperator, tables: Sequence[TableRows]) -> SavedOperator:
        """Write the tables; return the operator with its tables of the same names replaced."""
        schemas, pieces = dict(operator.tables), list(operator.pieces)
        earliest_ms: dict[int, int | None] = {times.shard: times.earliest_timer_ms for times in operator.times}
        for rows in tables:
            index = {} if rows.index is None else {rows.index.name: rows.index}
            own = {rows.schema.name: rows.schema, **index}
            into = self.settings, self.target, self.name, self.maker, operator.name
            writer = TableWriter(*into, [*own.values()], rows.ends)
            # If there are no rows, no column has a null.
            not_null = frozenset(rows.schema.columns.names[_LEADING:])
            pieces = [piece for piece in pieces if piece.table not in own]
            for row in run_frame(rows.by_shard(operator.shards), writer, WRITTEN):
                pieces += [Piece.read(piece, "a piece") for piece in json.loads(row["pieces"])]
                not_null &= frozenset(json.loads(row["not_null"]))
                known = [ms for ms in (earliest_ms.get(row["shard"]), row["earliest_ms"]) if ms is not None]
                earliest_ms[row["shard"]] = min(known, default=None)
            schemas |= own | {rows.schema.name: replace(rows.schema, not_null=not_null)}
        # 0: a later time would mean that everything due before it was evicted, which is unknown for these rows.
        times = tuple(ShardTimes(shard, due_ms, 0) for shard, due_ms in sorted(earliest_ms.items()))
        declared = operator.declared or schemas
        return replace(operator, tables=schemas, declared=declared, times=times).with_pieces(pieces)


def _no_query(sources: int | Sequence[str], partitions: int) -> SavedQuery:
    """Return a saved query that has not started: each source is at its beginning."""
    named = isinstance(sources, Sequence)
    names = []
    if isinstance(sources, Sequence) and not isinstance(sources, str):
        names = [str(name) for name in sources]
    elif type(sources) is int:
        names = [f"{number}" for number in range(sources)]
    if not names or len(set(names)) < len(names) or not all(map(SOURCE.fullmatch, names)):
        raise InvalidArgumentError(
            "sources must be a positive number, or names of letters, digits and underscores", sources=sources
        )
    conf = {PARTITIONS: f"{partitions}"} | ({NAMED_SOURCES_SETTING: "true"} if named else {})
    batch = {"batchWatermarkMs": 0, "batchTimestampMs": clock.now_ms(), "conf": conf}
    positions = tuple(SavedSource(name, "-", ()) for name in names)
    return SavedQuery("", 0, NAMED_SOURCES if named else "v1", json.dumps(batch), 0, positions)
