"""Makes a savepoint of DataFrames: the initial state of a new query, or an edited copy of another savepoint.

::

    a DataFrame for each table ──▶ pieces                     tasks, one for each shard
    what the base has besides  ──▶ copies                     tasks
    manifest                                                  driver, last
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from holdfast import clock
from holdfast.backends.registry import backend_names
from holdfast.errors import InvalidArgumentError
from holdfast.settings import Settings
from holdfast.snapshotter.savepoints.making import Making, making
from holdfast.snapshotter.savepoints.manifest import SOURCE, SavedQuery, SavedSource, Savepoint
from holdfast.snapshotter.savepoints.saved_operator import SavedOperator, ShardTimes
from holdfast.snapshotter.savepoints.savepoints import read_log, read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.plan.arguments import operator_name
from holdfast.spark_integration.plan.shuffle_partitions import shuffle_partitions
from holdfast.spark_integration.savepoints.changes import require_comment, require_counts
from holdfast.spark_integration.savepoints.seeding import PARTITIONS
from holdfast.spark_integration.savepoints.tasks import versions_of
from holdfast.spark_integration.savepoints.writing.copying import copy_pieces
from holdfast.spark_integration.savepoints.writing.tables import TableRows, edited_tables, tables_of_frames
from holdfast.spark_integration.savepoints.writing.task import write_table
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.shard.pointer_row import GROUP_STATE
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode
from holdfast.spark_integration.spark_state.query_location import NAMED_SOURCES, NAMED_SOURCES_SETTING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


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
    """Writes the tables of an operator into a savepoint that is not finished.

    Attributes
    ----------
    spark : SparkSession
    settings : Settings
        Of the session, without credentials.
    target, name : str
        URL of the directory of savepoints, and the savepoint's name.
    """

    spark: SparkSession
    settings: Settings
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
    """Copy what a savepoint has besides some tables of an operator: from the first folder to the second."""
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
