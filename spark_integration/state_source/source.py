"""The data source ``holdfast``: state as a Spark table.

::

    spark.read.format("holdfast").option("operator", "totals").load("s3://bucket/savepoints/before-upgrade")

`holdfast.state` reads a query by its checkpoint location, with state directory and micro-batch as options.

On the driver, Spark gives a source neither session nor settings: storage settings are passed as options, or found where
the store's own tools look. Options are sent to executors, except credentials, which tasks take from their session.

A table is read in parts, each a range of hashes in a shard::

    savepoint     a part per piece
    query         a part per shard with state
    changes       a part per shard with changes since the feed's start

The driver reads a savepoint's manifest or a query's pointers. Executors read pieces, or restore each shard at its
pointer from durable storage.

A change feed is read from the commits, newest first, along their lineage::

    pointer 25 ─▶ carried: 24, 25 ─▶ commits/23 ─▶ commits/21 ─▶ …      each has its micro-batches' writes

A commit shared by several micro-batches has their net change, and counts for the last of them.

The columns of a read::

    batch_id   change_type   user    n      total    shard
    └─ of a change feed ─┘   └key┘   └──values───┘

Spark accepts a batch only if its Arrow schema equals the schema that Spark derives from the read's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from holdfast.backends.arrow.values import cast
from holdfast.backends.evolution import evolved
from holdfast.backends.options import did_you_mean, nearest_name
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.errors import CorruptionError, InvalidArgumentError, NotFoundError
from holdfast.settings import STORAGE_PREFIX
from holdfast.snapshotter.commits import Commit, CommitObjects, ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import read_operator, shard_prefix
from holdfast.snapshotter.ownership.stored_tables import StoredTables, stored_tables
from holdfast.snapshotter.savepoints.manifest import Piece
from holdfast.snapshotter.savepoints.savepoints import read_piece, read_savepoint, savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import CREDENTIALS
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, list_state_dir
from holdfast.snapshotter.version_reader import read_tables
from holdfast.spark_integration.executor.takeover import working_directory
from holdfast.spark_integration.lookup.keys import ShardRanges, free_name, keys_of, parse_key, shown_columns
from holdfast.spark_integration.lookup.query_pointers import StoredOperator
from holdfast.spark_integration.lookup.stored_query import open_query
from holdfast.spark_integration.processor.state.variable_tables import find_shown, grouping_columns
from holdfast.spark_integration.savepoints.restoring_shards import HashRange
from holdfast.spark_integration.shard.pointer_row import PointerRow
from holdfast.spark_integration.shard.task import io_executor, local_dir_of_session, session_values
from holdfast.spark_integration.spark_state.query_location import json_object
from holdfast.spark_integration.spark_types import arrow_schema, spark_type

STORAGE = "storage."
#: A JSON object of storage options with capitals in their names, since Spark passes names in lower case.
STORAGE_IN_JSON = "storage"
NAMES = (
    "path",
    "operator",
    "table",
    "stateVarName",
    "columns",
    "key",
    "shards",
    STORAGE_IN_JSON,
    "stateDir",
    "batchId",
    "readChangeFeed",
    "changeStartBatchId",
)
_AS_GIVEN = {name.lower(): name for name in NAMES}
#: Options of queries only.
_OF_QUERY = ("batchId", "readChangeFeed", "changeStartBatchId")
_NUMBER = re.compile("[0-9]{1,18}")
SHARD, BATCH_ID, CHANGE_TYPE = "shard", "batch_id", "change_type"
UPDATE, DELETE = "update", "delete"
# Upper limits of a batch for Spark, whose text columns must stay below 2 GiB.
_BATCH_ROWS, _BATCH_BYTES = 1_000_000, 256 << 20
NAME = "holdfast"


@dataclass(frozen=True)
class StoragePlace:
    """A directory of savepoints or a state directory, with the options to open it."""

    url: str
    options: Mapping[str, str] = field(repr=False)

    def open(self) -> ObjectStorage:
        return open_storage(self.url, self.options)

    def without_credentials(self) -> StoragePlace:
        """Return the place without credentials, to send to tasks."""
        return replace(self, options={name: value for name, value in self.options.items() if name not in CREDENTIALS})

    def in_task(self) -> StoragePlace:
        """Return the place with the credentials from the running task's session."""
        return replace(self, options={**self.options, **session_values(STORAGE_PREFIX, CREDENTIALS)})


@dataclass(frozen=True)
class ReadOptions:
    path: str  #: A savepoint's directory, a slash, and its name; or a query's checkpoint location
    operator: str | None = None  #: Required for a query, and for a savepoint with several operators
    table: str = "state"  #: A state table, or the name of a processor's variable
    columns: tuple[str, ...] = ()  #: The columns to return, in this order; all if empty
    key: Mapping[str, Any] = field(default_factory=dict)  #: Read only this key's rows; all if empty
    shards: ShardRanges | None = None  #: Read only these shards; None for all
    state_dir: str | None = None  #: A query's state directory; None for a savepoint
    batch_id: int | None = None  #: The micro-batch, or a change feed's last; None for the last committed
    changes_from: int | None = None  #: A change feed's first micro-batch; None for state
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)  #: Storage options

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Parse the options of a read. Raises `InvalidArgumentError`."""
        values = {name.lower(): value for name, value in given.items()}
        storage = {name.removeprefix(STORAGE): value for name, value in values.items() if name.startswith(STORAGE)}
        values = {name: value for name, value in values.items() if not name.startswith(STORAGE)}
        storage |= in_json(values.get(STORAGE_IN_JSON, "{}"))
        for name in values:
            if name not in _AS_GIVEN:
                near = nearest_name(name, list(_AS_GIVEN))
                raise InvalidArgumentError(
                    f"no such option; the options are {', '.join(NAMES[1:])}, and {STORAGE}<name> for "
                    "spark.holdfast.storage.<name>",
                    option=name,
                    near=_AS_GIVEN.get(near) if near else None,
                )
        if "table" in values and "statevarname" in values:
            raise InvalidArgumentError("table and stateVarName are one option: name the table once")
        if not values.get("path", "").strip("/"):
            raise InvalidArgumentError("load the path of a savepoint: <directory>/<name>")
        changes_from = _changes_from(values)
        of_query = next((name for name in _OF_QUERY if name.lower() in values), None)
        if of_query is not None and "statedir" not in values:
            raise InvalidArgumentError(
                "a savepoint is one version: holdfast.state(spark, checkpoint_location, operator, …) reads a query and "
                "takes this, and holdfast savepoint diff compares savepoints",
                option=of_query,
            )
        return cls(
            values["path"],
            values.get("operator"),
            values.get("table", values.get("statevarname", "state")),
            _columns(values["columns"]) if "columns" in values else (),
            parse_key(values["key"]) if "key" in values else {},
            ShardRanges.parse(values["shards"]) if "shards" in values else None,
            values.get("statedir"),
            _batch_id(values, "batchId"),
            changes_from,
            storage,
        )


def storage_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return a session's storage settings as options; those with capitals share an option with a JSON object."""
    in_json = {name: value for name, value in given.items() if name != name.lower()}
    options = {STORAGE + name: value for name, value in given.items() if name not in in_json}
    return options | ({STORAGE_IN_JSON: json.dumps(in_json)} if in_json else {})


def in_json(text: str) -> dict[str, str]:
    """Parse the option ``storage``. Raises `InvalidArgumentError` if it is not a JSON object of strings."""
    found = json_object(text)
    if found is None or any(type(value) is not str for value in found.values()):
        # The error omits the text, which may contain credentials.
        raise InvalidArgumentError('the option storage must be a JSON object of strings, such as {"anon": "true"}')
    return found


def columns_option(names: object) -> str:
    """Encode column names as the text of the `columns` option. Raises `InvalidArgumentError`."""
    found = None if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if not found or any(not isinstance(name, str) for name in found):
        raise InvalidArgumentError("columns must be a list of names; omit it for all columns", columns=names)
    return json.dumps(found)


def _columns(text: str) -> tuple[str, ...]:
    """Parse ``a, b`` or, for names with a comma, ``["a", "b"]``."""
    names: object = [name.strip() for name in text.split(",") if name.strip()]
    if text.startswith("["):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError):
            names = None
    if not isinstance(names, list) or any(type(name) is not str for name in names):
        raise InvalidArgumentError('the option columns must be a,b or ["a", "b"]', columns=text[:200])
    if not names:
        raise InvalidArgumentError("the option columns names no column: leave it out for all", columns=text[:200])
    if len(set(names)) < len(names):
        raise InvalidArgumentError("the option columns names a column twice", columns=text[:200])
    return tuple(names)


def _batch_id(values: Mapping[str, str], option: str) -> int | None:
    text = values.get(option.lower())
    if text is not None and not _NUMBER.fullmatch(text):
        raise InvalidArgumentError(f"the option {option} must be a whole number, 0 or more", given=text[:200])
    return None if text is None else int(text)


def _changes_from(values: Mapping[str, str]) -> int | None:
    first, is_feed = _batch_id(values, "changeStartBatchId"), values.get("readchangefeed", "false").lower()
    if is_feed not in ("true", "false"):
        raise InvalidArgumentError("the option readChangeFeed must be true or false", given=is_feed[:200])
    if is_feed == "true" and first is None:
        raise InvalidArgumentError("readChangeFeed needs changeStartBatchId: the first micro-batch")
    if is_feed == "false" and first is not None:
        raise InvalidArgumentError("changeStartBatchId needs readChangeFeed=true")
    return first


@dataclass(frozen=True)
class ShownTable:
    """The requested columns of a table, in order."""

    fields: tuple[StructField, ...]  #: All columns
    wanted: tuple[str, ...]  #: The names of the requested columns, in order
    shard: str  #: The name of the shard column
    changes: tuple[str, ...] = ()  #: The names of a change feed's columns; empty for state

    @classmethod
    def of(cls, table: TableSchema, wanted: Sequence[str] = (), *, changes: bool = False) -> Self:
        """Return the columns of a table. Raises `NotFoundError`, `InvalidArgumentError`."""
        shown = shown_columns(table)
        taken = list(shown.names)
        own = []
        for name in ((BATCH_ID, CHANGE_TYPE) if changes else ()) + (SHARD,):
            own.append(free_name(name, taken, "_"))
            taken.append(own[-1])
        fields = [StructField(field.name, spark_type(field.type)) for field in shown]
        first = [StructField(name, kind) for name, kind in zip(own[:-1], (LongType(), StringType()), strict=False)]
        every = (*first, *fields, StructField(own[-1], IntegerType()))
        names = [field.name for field in every]
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise NotFoundError(
                f"no such column: choose one of these{did_you_mean(unknown[0], names)}",
                column=unknown[0],
                columns=", ".join(names),
            )
        return cls(every, tuple(wanted) or tuple(names), own[-1], tuple(own[:-1]))

    @property
    def struct(self) -> StructType:
        """The requested columns in Spark's types."""
        by_name = {field.name: field for field in self.fields}
        return StructType([by_name[name] for name in self.wanted])

    @cached_property
    def arrow(self) -> pa.Schema:
        """The Arrow schema of a batch."""
        return arrow_schema(self.struct, "the state")

    def batches(self, run: Run, shard: int, batch_id: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield rows as batches for Spark, with `batch_id` in a change feed. Raises `InvalidArgumentError`."""
        names = [field.name for field in self.fields]
        places = [names.index(name) - len(self.changes) for name in self.wanted]
        for chunk in run.chunks(_BATCH_ROWS, _BATCH_BYTES):
            stored = chunk.batch.columns[2:]
            arrays = [
                self._column(stored[place], field.type)
                if 0 <= place < len(stored)
                else self._own(field, chunk, shard, batch_id)
                for place, field in zip(places, self.arrow, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=self.arrow)

    def _column(self, column: pa.Array, t: pa.DataType) -> pa.Array:
        try:
            return cast(column, t)
        except (ValueError, pa.ArrowException) as exc:
            raise InvalidArgumentError(f"some rows of the state are too large for Spark: {exc}") from exc

    def _own(self, field: pa.Field, rows: Run, shard: int, batch_id: int | None) -> pa.Array:
        if field.name == self.shard:
            return pa.repeat(pa.scalar(shard, field.type), len(rows))
        if field.name == self.changes[0]:
            return pa.repeat(pa.scalar(batch_id, field.type), len(rows))
        return pa.array(np.array([UPDATE, DELETE], object), field.type).take(pa.array(rows.deleted.view(np.int8)))


@dataclass(frozen=True)
class ReadPart(InputPartition):
    """The part that a task reads: a shard's rows with hashes in a range."""

    shard: int
    hashes: HashRange


#: Rows of a part and, in a change feed, the micro-batch that wrote them.
PartRows = tuple[Run, int | None]


@dataclass(frozen=True)
class PiecePart(ReadPart):
    piece: Piece


@dataclass(frozen=True)
class SavedTable:
    """A table of an operator in the savepoint `name` in the directory `place`."""

    place: StoragePlace
    name: str
    operator: str
    schema: TableSchema  #: The shown schema
    grouping: tuple[str, ...]  #: The hashed key columns; empty if unknown
    pieces: tuple[Piece, ...] = field(repr=False)

    @classmethod
    def find(cls, options: ReadOptions) -> SavedTable:
        """Find the table that the options name. Raises `InvalidArgumentError`, `NotFoundError`, `CorruptionError`."""
        target, _, name = options.path.rstrip("/").rpartition("/")
        if not target or not name:
            raise InvalidArgumentError("load the path of a savepoint: <directory>/<name>")
        place = StoragePlace(target, options.storage)
        with place.open() as storage:
            try:
                savepoint = read_savepoint(storage, name)
            except NotFoundError as exc:
                raise NotFoundError(
                    f"{exc.message}; for a query's state, name the checkpointLocation and an operator (holdfast.state)",
                    **exc.facts,
                ) from exc
            operator = savepoint.find_operator(options.operator)
        if options.shards is not None:
            options.shards.require_below(operator.shards)
        table = find_shown(operator.tables, options.table)
        grouping = grouping_columns(operator.tables, table)
        return cls(place, name, operator.name, operator.tables[table], grouping, tuple(operator.of_table(table)))

    def parts(self) -> list[ReadPart]:
        return [PiecePart(piece.shard, HashRange(piece.first_hash, piece.last_hash), piece) for piece in self.pieces]

    def rows(self, storage: ObjectStorage, part: ReadPart) -> Iterator[PartRows]:
        """Read a part from its opened storage. Raises `HoldfastError`."""
        assert isinstance(part, PiecePart)
        yield read_piece(savepoint_folder(storage, self.name), self.operator, part.piece, self.schema), None

    def for_tasks(self) -> SavedTable:
        """Return the table without parts and credentials."""
        return replace(self, place=self.place.without_credentials(), pieces=())


@dataclass(frozen=True)
class ShardPart(ReadPart):
    """A shard at its pointer, in one of the operator's directories."""

    directory: str
    at: PointerRow = field(repr=False)


@dataclass(frozen=True)
class QueryTable:
    """A table of a query's operator after a micro-batch, or its changes; see `SavedTable`."""

    place: StoragePlace  #: The state directory
    stored: Mapping[str, StoredTables] = field(repr=False)  #: By directory
    schema: TableSchema
    grouping: tuple[str, ...]
    changes_from: int | None  #: A change feed's first micro-batch; None for state
    shards: tuple[ShardPart, ...] = field(repr=False)

    @classmethod
    def find(cls, options: ReadOptions) -> QueryTable:
        """Find the table that the options name. Raises `InvalidArgumentError`, `NotFoundError`, `CorruptionError`."""
        if options.operator is None or options.state_dir is None:
            raise InvalidArgumentError("a query's state needs the options operator and stateDir: see holdfast.state")
        place = StoragePlace(options.state_dir, options.storage)
        with open_query(options.path, place.url, options.storage) as query:
            operator = query.operator(options.operator, options.batch_id)
        with place.open() as storage:
            stored = {name: stored_tables(storage, read_operator(storage, name)) for name in operator.pointers}
            if options.changes_from is not None:
                _require_kept(storage, operator, options.changes_from)
        if options.shards is not None:
            options.shards.require_below(operator.shards)
        every = {name: schema for tables in stored.values() for name, schema in tables.held.items()}
        table = find_shown(every, options.table)
        latest = [tables.latest[table] for tables in stored.values() if table in tables.latest]
        return cls(
            place,
            stored,
            reduce(evolved, latest),
            grouping_columns(every, table),
            options.changes_from,
            tuple(
                ShardPart(row.shard, HashRange.of_shard(row.shard, operator.shards), directory, row)
                for directory, rows in operator.pointers.items()
                for row in rows
                if row.pointer is not None and table in stored[directory].held
            ),
        )

    def parts(self) -> list[ReadPart]:
        """Return the shards with state or, in a change feed, with changes."""
        return [part for part in self.shards if self.changes_from is None or _version(part.at) > self.changes_from]

    def rows(self, storage: ObjectStorage, part: ReadPart) -> Iterator[PartRows]:
        """Read a shard from its opened storage. Raises `HoldfastError`."""
        assert isinstance(part, ShardPart)
        return self._live(storage, part) if self.changes_from is None else self._changes(storage, part)

    def _live(self, storage: ObjectStorage, part: ShardPart) -> Iterator[PartRows]:
        assert part.at.pointer is not None
        with working_directory(local_dir_of_session()) as home:
            prefix, stored = shard_prefix(part.directory, part.shard), self.stored[part.directory]
            carried = dict(part.at.carried_commits)
            log = ObjectCommitLog(storage, prefix, stored.held, io_executor(), home, carried=carried)
            rows = read_tables(log, part.at.pointer, [self.schema.name])
        for run in rows.values():
            yield stored.shown(run, self.schema), None

    def _changes(self, storage: ObjectStorage, part: ShardPart) -> Iterator[PartRows]:
        assert self.changes_from is not None
        stored = self.stored[part.directory]
        held = stored.held[self.schema.name]
        for commit in _commits_after(storage, part, held, self.changes_from):
            run = commit.run_of(held)
            if run is not None:
                # Micro-batch b commits version b + 1.
                yield stored.shown(run, self.schema), commit.pointer.version - 1

    def for_tasks(self) -> QueryTable:
        """Return the table without shards and credentials."""
        return replace(self, place=self.place.without_credentials(), shards=())


#: A table of an operator; sent to executors without its parts.
ReadableTable = SavedTable | QueryTable


def find_table(options: ReadOptions) -> ReadableTable:
    """Find the table that the options name. Raises `InvalidArgumentError`, `NotFoundError`, `CorruptionError`."""
    return SavedTable.find(options) if options.state_dir is None else QueryTable.find(options)


def _version(row: PointerRow) -> int:
    return -1 if row.pointer is None else row.pointer.version


def _commits_after(storage: ObjectStorage, part: ShardPart, table: TableSchema, version: int) -> Iterator[Commit]:
    """Yield a shard's commits after a version, newest first."""
    row = part.at
    assert row.pointer is not None
    objects = CommitObjects(PrefixedStorage(storage, shard_prefix(part.directory, part.shard)), {table.name: table})
    commit = objects.newest(row.pointer, row.carried)
    while commit.pointer.version > version:
        yield commit
        last = commit.lineage.last
        if last is None or last.version <= version:
            return
        try:
            commit = objects.fetch(last)
        except CorruptionError as exc:
            if isinstance(exc.__cause__, NotFoundError):
                raise _cleaned_up(part.directory, part.shard, last.version) from exc
            raise


def _require_kept(storage: ObjectStorage, operator: StoredOperator, version: int) -> None:
    """Check before tasks run that all shards retain the commits after a version; the oldest are deleted first."""
    missing: list[tuple[int, str, int]] = []
    for directory, rows in operator.pointers.items():
        listing = list_state_dir(storage, directory).operators[directory]
        for row in rows:
            prefix = shard_prefix(directory, row.shard)
            shard = listing.shards.get(prefix)
            commits = shard.of_kind("commit") if shard else []
            if _version(row) > version and commits and commits[0].version > version:
                last = Headers(PrefixedStorage(storage, prefix)).commit(commits[0]).lineage.last
                if last is not None and last.version > version:
                    missing.append((last.version, directory, row.shard))
    if missing:
        first, directory, number = max(missing)
        raise _cleaned_up(directory, number, first)


def _cleaned_up(directory: str, shard: int, first: int) -> NotFoundError:
    """Return the error for a feed that starts before a shard's oldest commit; `first` is the earliest start."""
    return NotFoundError(
        f"the change feed begins before the oldest retained commit: begin with micro-batch {first} or a later one",
        operator=directory,
        shard=shard,
        first=first,
    )


class StateSource(DataSource):
    """The data source ``holdfast``; see the module."""

    @classmethod
    def name(cls) -> str:
        return NAME

    @cached_property
    def _parsed(self) -> ReadOptions:
        return ReadOptions.parse(dict(self.options))

    @cached_property
    def _table(self) -> tuple[ReadableTable, ShownTable]:
        options = self._parsed
        table = find_table(options)
        return table, ShownTable.of(table.schema, options.columns, changes=options.changes_from is not None)

    @cached_property
    def _key(self) -> Keys | None:
        table, key = self._table[0], self._parsed.key
        return keys_of(table.schema, table.grouping, [key]) if key else None

    def schema(self) -> StructType:
        """Return a change feed's columns, the key columns, the value columns and ``shard``."""
        _ = self._key  # checks the key: Spark calls `schema` first
        return self._table[1].struct

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader; `schema` is the user's, if given."""
        (table, shown), options = self._table, self._parsed
        if schema != shown.struct:
            raise InvalidArgumentError(
                "state has its own schema: omit .schema(…), and select columns with the option columns",
                columns=", ".join(shown.wanted),
            )
        return TableReader(table, shown, options.shards, self._key)


class TableReader(DataSourceReader):
    """Reads the parts of a table, limited to `shards` or `key` if given; sent to executors."""

    def __init__(self, table: ReadableTable, shown: ShownTable, shards: ShardRanges | None, key: Keys | None) -> None:
        wanted = None if key is None else HashRange(*[int(key.hashes[0])] * 2)
        self._parts = [
            part
            for part in table.parts()
            if (shards is None or part.shard in shards) and (wanted is None or part.hashes.overlaps(wanted))
        ]
        self._table, self._shown, self._key = table.for_tasks(), shown, key

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes to pickle without parts, since Spark sends each task its part."""
        return {**self.__dict__, "_parts": []}

    def partitions(self) -> list[InputPartition]:
        return list(self._parts)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadPart):  # Spark's own partition if there are no parts
            return
        with self._table.place.in_task().open() as storage:
            for rows, batch_id in self._table.rows(storage, partition):
                run = rows
                if self._key is not None:
                    key_hash = int(self._key.hashes[0])
                    run = rows.slice(key_hash, key_hash).with_prefixes(self._key)
                yield from self._shown.batches(run, partition.shard, batch_id)
