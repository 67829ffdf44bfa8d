"""What a task does for a savepoint that is made of DataFrames: it sorts the rows of a shard, and stores them as pieces.

A key that stands twice, a null where none may be and a value that its type does not hold are errors that name the key:
nobody could say which of two rows counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import HashArray, order_rows
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.backends.stored_schema import decode_schemas, encode_schemas
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.settings import Settings
from holdfast.snapshotter.fields import NUMBER_LIMIT, Fields
from holdfast.snapshotter.savepoints.pieces import write_pieces
from holdfast.snapshotter.savepoints.saved_operator import Piece
from holdfast.snapshotter.savepoints.savepoints import savepoint_folder
from holdfast.spark_integration.savepoints.tasks import each_ahead, failed, run_frame
from holdfast.spark_integration.shard.task_storage import storage_at
from holdfast.spark_integration.tables.key_rows import EXPIRES, NEVER
from holdfast.spark_integration.tables.key_timers import TIMERS
from holdfast.spark_integration.tables.timers import first_due_ms, timers_run

if TYPE_CHECKING:
    from holdfast.spark_integration.savepoints.writing.tables import TableRows

#: What a task returns of each shard: its pieces, when its first timer is due, and which columns have no null.
WRITTEN = "operator string, shard int, pieces string, earliest_ms long, not_null string, error string"
_WRITTEN = pa.schema(
    [
        ("operator", pa.string()),
        ("shard", pa.int32()),
        ("pieces", pa.string()),
        ("earliest_ms", pa.int64()),
        ("not_null", pa.string()),
        ("error", pa.string()),
    ]
)
_BEFORE = 2  # hash and shard; in a run, hash and deletion mark


@dataclass(frozen=True)
class WrittenTable:
    """A table that tasks have stored.

    Attributes
    ----------
    schemas : mapping of str to TableSchema
        Its own, where `TableSchema.not_null` has the columns without a null, and that of its index.
    pieces : tuple of Piece
        Of both, by shard, ascending.
    earliest_ms : mapping of int to int or None
        By shard with rows: the earliest time of the index.
    """

    schemas: Mapping[str, TableSchema]
    pieces: tuple[Piece, ...]
    earliest_ms: Mapping[int, int | None]


def write_table(
    rows: TableRows, settings: Settings, target: str, name: str, operator: str, shards: int
) -> WrittenTable:
    """Store the rows of a table as pieces of a savepoint that is not finished.

    Parameters
    ----------
    settings : Settings
        Of the session, without credentials.
    target, name : str
        URL of the directory of savepoints, and the savepoint's name.

    Raises
    ------
    InvalidArgumentError, SchemaMismatchError
        A key stands twice, or a value cannot be stored; the message names the key.
    """
    index = {} if rows.index is None else {rows.index.name: rows.index}
    schemas = {rows.schema.name: rows.schema, **index}
    writer = TableWriter(settings, target, name, operator, encode_schemas(schemas))
    pieces: list[Piece] = []
    earliest_ms: dict[int, int | None] = {}
    not_null: frozenset[str] | None = None
    for row in run_frame(rows.by_shard(shards), writer, WRITTEN):
        found = [Piece.read(Fields(piece, "a piece", *Piece.FIELDS)) for piece in json.loads(row["pieces"])]
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
    """Stores the rows of a task's shards; a function for ``mapInArrow`` over `TableRows.by_shard`.

    Attributes
    ----------
    settings : Settings
        Of the session, without credentials.
    target : str
        URL of the directory of savepoints.
    name, operator : str
        Of the savepoint, and of the operator in it.
    schemas : mapping of str to list of str
        Encoded: of the table, and of its index, if it has one.
    """

    settings: Settings
    target: str
    name: str
    operator: str
    schemas: Mapping[str, list[str]]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what is stored of each shard.

        Raises
        ------
        UnavailableError
            A storage did not answer; Spark repeats the task. Other errors are returned: repeating would not help.
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
            yield pa.RecordBatch.from_pylist([self._written(shard, own)], schema=_WRITTEN)

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
    """Return rows as a run.

    Parameters
    ----------
    hashes : numpy.ndarray of int64, shape (n,)
        Of the rows' keys.
    rows : pyarrow.Table, shape (n, columns)
        The key columns and the value columns in the order of the schema, whatever their names.

    Raises
    ------
    InvalidArgumentError
        A key stands twice.
    SchemaMismatchError
        A value cannot be stored without loss.
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
    """Return by which time each row of a table stands in its index; null where it does not."""
    if run.schema.name != TIMERS:
        expires_ms = run.values.column(EXPIRES)
        return pc.if_else(pc.equal(expires_ms, NEVER), None, expires_ms)
    if len(run.schema.value):
        return run.values.column(0)  # one timer for each key
    return run.keys.column(run.keys.num_columns - 1)  # any number of them
