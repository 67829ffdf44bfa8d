"""What a task does for a restore: it makes the first version of new shards from a savepoint's pieces.

::

    savepoint, 2 shards      0x00… ─ piece ─ piece ─ 0x80… ─ piece ─ piece ─ 0xff…
    restored, 3 shards       0x00… ───────── 0x55… ───────────── 0xaa… ───── 0xff…

A shard is a range of hashes, so a new shard's rows are slices of the old pieces, in their order: nothing is sorted, but
for timers, which stand in the order of their times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast import clock
from holdfast.backends.arrow.rows import filter_rows
from holdfast.backends.base import Pointer
from holdfast.backends.run import Run, TableSchema, join_runs, merge_runs
from holdfast.backends.stored_schema import decode_schemas
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError
from holdfast.settings import Settings
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.fields import Fields
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.savepoints.pieces import read_piece
from holdfast.snapshotter.savepoints.saved_operator import Piece, SavedOperator
from holdfast.snapshotter.savepoints.savepoints import savepoint_folder
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.processor.state.list_state import renumbered
from holdfast.spark_integration.processor.state.variables import is_of_elements
from holdfast.spark_integration.savepoints.migrating import Migration
from holdfast.spark_integration.savepoints.tasks import as_text, working_folder
from holdfast.spark_integration.shard.task_storage import io_executor, storage_at
from holdfast.spark_integration.tables.key_timers import TIMERS_BY_DUE
from holdfast.spark_integration.tables.timers import first_due_ms, hashes_of_keys, is_by_time

#: The version that a restored query begins with: that after its micro-batch 0.
FIRST_VERSION = 1
#: What a task is given of each shard, and what it returns: a commit, or an error.
SHARD = "operator string, shard int, pieces string"
RESTORED = "operator string, shard int, commit string, earliest_timer_ms long, error string"
_RESTORED = pa.schema(
    [
        ("operator", pa.string()),
        ("shard", pa.int32()),
        ("commit", pa.string()),
        ("earliest_timer_ms", pa.int64()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class HashRange:
    """The hashes of a shard's keys, both ends included."""

    first: int
    last: int

    @classmethod
    def of_shard(cls, shard: int, shards: int) -> HashRange:
        """Return the range of a shard; see `holdfast.spark_integration.transport.routes`."""
        begins = [-(-(number << 32) // shards) << 32 for number in (shard, shard + 1)]
        return cls(begins[0], begins[1] - 1)

    def overlaps(self, other: HashRange) -> bool:
        """Tell whether a hash is in both."""
        return self.first <= other.last and other.first <= self.last


def shard_rows(operator: SavedOperator, shards: int) -> list[tuple[Any, ...]]:
    """Return what tasks are given of an operator's new shards, as `SHARD` has it; none of shards that get no rows."""
    rows = []
    for shard in range(shards):
        wanted = HashRange.of_shard(shard, shards)
        pieces = [piece.to_json() for piece in operator.pieces if may_have(operator, piece, wanted)]
        if pieces:
            rows.append((operator.name, shard, json.dumps(pieces)))
    return rows


def may_have(operator: SavedOperator, piece: Piece, wanted: HashRange) -> bool:
    """Tell whether a piece may have rows of a range of hashes."""
    if is_by_time(operator.tables[piece.table]):
        return HashRange.of_shard(piece.shard, operator.shards).overlaps(wanted)
    return HashRange(piece.first_hash, piece.last_hash).overlaps(wanted)


@dataclass(frozen=True)
class ShardRestorer:
    """Restores the shards of a task; a function for ``mapInArrow`` over rows of `SHARD`.

    Attributes
    ----------
    settings : Settings
        Of the session, without credentials; its checkpoint directory is where state goes.
    source : str
        URL of the directory of savepoints.
    name : str
        Of the savepoint.
    operators : mapping of str to RestoredOperator
        By the name that the savepoint has.
    """

    settings: Settings
    source: str
    name: str
    operators: Mapping[str, RestoredOperator]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the commit of each shard.

        Raises
        ------
        UnavailableError
            A storage did not answer; Spark repeats the task. Other errors are returned: repeating would not help.
        """
        for batch in batches:
            for row in batch.to_pylist():
                yield pa.RecordBatch.from_pylist([self._restored(row)], schema=_RESTORED)

    def _restored(self, row: Mapping[str, Any]) -> dict[str, Any]:
        shard = {"operator": row["operator"], "shard": row["shard"]}
        source = f"a piece of {row['operator']}"
        pieces = [Piece.read(Fields(piece, source, *Piece.FIELDS)) for piece in json.loads(row["pieces"])]
        try:
            commit_id, earliest_timer_ms = self._commit(row["operator"], row["shard"], pieces)
        except HoldfastError as exc:
            if exc.retryable:
                raise
            return {**shard, "commit": None, "earliest_timer_ms": None, "error": as_text(exc)}
        return {**shard, "commit": commit_id, "earliest_timer_ms": earliest_timer_ms, "error": None}

    def _commit(self, name: str, shard: int, pieces: Sequence[Piece]) -> tuple[str | None, int | None]:
        """Store a shard's rows; return the commit's id, None if it has no rows, and when its first timer is due."""
        assert self.settings.checkpoint_dir is not None
        operator = self.operators[name]
        tables = decode_schemas(operator.schemas)
        folder = savepoint_folder(storage_at(self.source, self.settings), self.name)
        wanted = HashRange.of_shard(shard, operator.shards)
        runs = {}
        for table, schema in tables.items():
            run = rows_of(folder, name, [piece for piece in pieces if piece.table == table], schema, wanted)
            if run is not None:
                if table in operator.migrations:
                    run = operator.migrations[table](run)
                runs[table] = renumbered(run, operator.versions) if is_of_elements(table) else run
        if not runs:
            return None, None
        storage = storage_at(self.settings.checkpoint_dir, self.settings)
        pointer = Pointer(FIRST_VERSION, clock.new_id())
        with working_folder(self.settings) as home:
            held = {**tables, **{name: migration.after for name, migration in operator.migrations.items()}}
            log = ObjectCommitLog(
                storage, shard_prefix(operator.directory, shard), held, io_executor(), home, carried_bytes=0
            )
            try:
                pending = log.append(pointer, None, runs)
            except InvalidArgumentError as exc:
                raise InvalidArgumentError(f"a shard would be too large; choose more shards: {exc}") from exc
            pending.wait()
        due = [runs[table] for table in runs if table == TIMERS_BY_DUE or operator.wakes_to_evict]
        due_ms = [first_due_ms(run) for run in due if is_by_time(run.schema)]
        return pointer.commit_id, min(due_ms, default=None)


@dataclass(frozen=True)
class RestoredOperator:
    """Where an operator's state goes.

    Attributes
    ----------
    directory : str
        Below the checkpoint directory.
    shards : int
    schemas : mapping of str to list of str
        Encoded, of all tables as they were saved.
    versions : int
        By how many the query's versions begin earlier than in the savepoint.
    wakes_to_evict : bool
        Whether rows that expire wake a shard, as timers do.
    migrations : mapping of str to Migration
        By table what gives it other columns.
    """

    directory: str
    shards: int
    schemas: Mapping[str, list[str]]
    versions: int
    wakes_to_evict: bool
    migrations: Mapping[str, Migration] = field(default_factory=dict)


def rows_of(
    folder: PrefixedStorage, operator: str, pieces: Sequence[Piece], schema: TableSchema, wanted: HashRange
) -> Run | None:
    """Return the rows of a table whose keys have hashes in a range; None if there are none.

    Parameters
    ----------
    folder : PrefixedStorage
        The savepoint's.
    pieces : sequence of Piece
        Of the table, in order: all that may have such rows.
    """
    by_time = is_by_time(schema)
    runs = []
    for piece in pieces:
        run = read_piece(folder, operator, piece, schema)
        run = _of_keys_in(run, wanted) if by_time else run.slice(wanted.first, wanted.last)
        if len(run):
            runs.append(run)
    if not runs:
        return None
    if by_time:
        return merge_runs(runs, drop_deletes=True)
    if any(before.hashes[-1] > after.hashes[0] for before, after in pairwise(runs)):
        raise CorruptionError("the pieces of a savepoint do not ascend", operator=operator, table=schema.name)
    return join_runs(runs)


def _of_keys_in(run: Run, wanted: HashRange) -> Run:
    hashes = hashes_of_keys(run)
    kept = (hashes >= np.uint64(wanted.first)) & (hashes <= np.uint64(wanted.last))
    return run if kept.all() else Run(run.schema, filter_rows(run.batch, kept))
