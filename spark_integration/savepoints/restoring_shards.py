"""Tasks that make the first version of new shards from a savepoint's pieces.

::

    savepoint, 2 shards      0x00… ─ piece ─ piece ─ 0x80… ─ piece ─ piece ─ 0xff…
    restored, 3 shards       0x00… ───────── 0x55… ───────────── 0xaa… ───── 0xff…

A shard is a hash range, so a new shard's rows are slices of the old pieces, in the same order. Only timers are sorted:
they are stored by time, and a task splits them by shard once.

A task restores some or all of the new shards that begin in one old shard, in order. It keeps the last piece for the
next shard, so it reads each piece once. Several tasks share an old shard if that repeats the reads of at most a quarter
of it: its timers, and a piece of each table.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise
from typing import Any, ClassVar

import numpy as np

from holdfast import clock
from holdfast.backends.arrow.rows import take
from holdfast.backends.base import Pointer
from holdfast.backends.run import Run, TableSchema, join_runs, merge_runs
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.savepoints.manifest import Piece, SavedOperator
from holdfast.snapshotter.savepoints.savepoints import read_piece, savepoint_folder
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.executor.takeover import working_directory
from holdfast.spark_integration.processor.state.variable_tables import is_of_elements
from holdfast.spark_integration.savepoints.changes import Migration
from holdfast.spark_integration.savepoints.tasks import ShardTask, each_ahead, failed
from holdfast.spark_integration.shard.task import io_executor
from holdfast.spark_integration.tables.entry_rows import renumbered
from holdfast.spark_integration.timers import TIMERS_BY_DUE, first_due_ms, hashes_of_keys, is_by_time
from holdfast.spark_integration.transport.routes import shards_of

#: A restored query's first version: the state after micro-batch 0.
FIRST_VERSION = 1


@dataclass(frozen=True)
class HashRange:
    """A shard's range of hashes, ends included."""

    first: int
    last: int

    @classmethod
    def of_shard(cls, shard: int, shards: int) -> HashRange:
        """Return the range of a shard; see `holdfast.spark_integration.transport.routes`."""
        begins = [-(-(number << 32) // shards) << 32 for number in (shard, shard + 1)]
        return cls(begins[0], begins[1] - 1)

    def overlaps(self, other: HashRange) -> bool:
        """Return whether the ranges share a hash."""
        return self.first <= other.last and other.first <= self.last

    def shards(self, shards: int) -> range:
        """Return which of `shards` shards overlap the range."""
        first, last = ((end >> 32) * shards >> 32 for end in (self.first, self.last))
        return range(first, last + 1)


def rows_of_shards(operator: SavedOperator, shards: int) -> list[tuple[Any, ...]]:
    """Return a `ShardRestorer`'s input for an operator's new shards; omit stretches of shards without rows."""
    stretches = list(_stretches(operator, shards))
    first_shards = [first for first, _ in stretches]
    pieces: list[list[dict[str, Any]]] = [[] for _ in stretches]
    for piece in operator.pieces:
        of_piece = HashRange(piece.first_hash, piece.last_hash)
        if is_by_time(operator.tables[piece.table]):  # ordered by time: any overlapping shard may have rows
            of_piece = HashRange.of_shard(piece.shard, operator.shards)
        new = of_piece.shards(shards)
        for found in pieces[bisect_right(first_shards, new[0]) - 1 : bisect_right(first_shards, new[-1])]:
            found.append(piece.to_json())
    return [
        (operator.name, first, last, json.dumps(found))
        for (first, last), found in zip(stretches, pieces, strict=True)
        if found
    ]


def _stretches(operator: SavedOperator, shards: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last new shard of each task."""
    pieces: dict[int, list[Piece]] = {}
    for piece in operator.pieces:
        pieces.setdefault(piece.shard, []).append(piece)
    # Lazily grouped by the old shard in which they begin: there may be very many.
    for old, begun in groupby(range(shards), lambda new: new * operator.shards // shards):
        new = list(begun)
        tasks = min(len(new), _tasks(operator, pieces.get(old, [])))
        ends = [len(new) * task // tasks for task in range(tasks + 1)]
        yield from ((new[begin], new[end - 1]) for begin, end in pairwise(ends))


def _tasks(operator: SavedOperator, pieces: Sequence[Piece]) -> int:
    """Return how many tasks may share an old shard while at most a quarter of it is read twice."""
    twice: dict[str, int] = {}
    for piece in pieces:
        by_time, before = is_by_time(operator.tables[piece.table]), twice.get(piece.table, 0)
        twice[piece.table] = before + piece.size_bytes if by_time else max(before, piece.size_bytes)
    all_bytes = sum(piece.size_bytes for piece in pieces)
    return 1 + all_bytes // (4 * max(1, sum(twice.values())))


@dataclass(frozen=True)
class ShardRestorer(ShardTask):
    """Restores a task's shards; see `ShardTask`."""

    #: The input has the first and last of consecutive shards; the output has a commit or an error for each.
    GIVEN: ClassVar[str] = "operator string, shard int, last int, pieces string"
    RETURNED: ClassVar[str] = "operator string, shard int, commit string, earliest_timer_ms long, error string"

    source: str  #: URL of the savepoint directory
    name: str  #: The savepoint's name
    operators: Mapping[str, RestoredOperator]  #: By saved name

    def work(self, row: Mapping[str, Any], opened: Callable[[str], ObjectStorage]) -> Iterator[Mapping[str, Any]]:
        name, source = row["operator"], f"a piece of {row['operator']}"
        pieces = [Piece.read(piece, source) for piece in json.loads(row["pieces"])]
        folder, target = savepoint_folder(opened(self.source), self.name), opened(self.target)
        operator, wanted = self.operators[name], range(row["shard"], row["last"] + 1)
        with closing(PieceRows(folder, name, operator.tables, pieces, operator.shards, wanted)) as read:
            for shard in wanted:
                facts = {"operator": name, "shard": shard}
                try:
                    commit_id, earliest_timer_ms = self._commit(name, shard, read, target)
                except HoldfastError as exc:
                    yield failed(facts, exc)
                    return
                yield facts | {"commit": commit_id, "earliest_timer_ms": earliest_timer_ms}

    def _commit(self, name: str, shard: int, read: PieceRows, storage: ObjectStorage) -> tuple[str | None, int | None]:
        """Store a shard's rows; return the commit id (None without rows) and the due time of the first timer."""
        operator = self.operators[name]
        runs = {}
        for table, run in read.of_shard(shard):
            changed = operator.migrations[table](run) if table in operator.migrations else run
            runs[table] = renumbered(changed, operator.versions) if is_of_elements(table) else changed
        if not runs:
            return None, None
        pointer = Pointer(FIRST_VERSION, clock.new_id())
        with working_directory(self.settings.local_dir) as home:
            held = {**read.tables, **{table: of.after for table, of in operator.migrations.items()}}
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
    """An operator's saved tables, and where and how to restore them."""

    directory: str  #: Below the state directory
    shards: int
    tables: Mapping[str, TableSchema]  #: Every table as saved
    versions: int  #: By how many versions the savepoint is ahead of the new query's first version
    wakes_to_evict: bool  #: Whether expiring rows wake a shard, as timers do
    migrations: Mapping[str, Migration] = field(default_factory=dict)  #: By table


class PieceRows:
    """The rows of new shards, which are requested once each, in order; pieces are prefetched, each once.

    `shards`: the new number of shards; `wanted`: those that are requested. Raises `CorruptionError`.
    """

    def __init__(
        self,
        folder: PrefixedStorage,
        name: str,
        tables: Mapping[str, TableSchema],
        pieces: Sequence[Piece],
        shards: int,
        wanted: range,
    ) -> None:
        self.tables = tables
        self._shards, self._wanted = shards, wanted
        self._pieces = {table: [piece for piece in pieces if piece.table == table] for table in tables}
        for table, mine in self._pieces.items():
            if not is_by_time(tables[table]) and any(a.last_hash > b.first_hash for a, b in pairwise(mine)):
                raise CorruptionError("the pieces of a savepoint do not ascend", operator=name, table=table)
        self._read = each_ahead(
            lambda piece: (piece, read_piece(folder, name, piece, self.tables[piece.table])), self._in_order()
        )
        # The last piece by table, and timers by table and shard.
        self._last: dict[str, tuple[Piece, Run]] = {}
        self._timers: dict[str, dict[int, list[Run]]] = {}

    def close(self) -> None:
        self._read.close()

    def of_shard(self, shard: int) -> Iterator[tuple[str, Run]]:
        """Yield the rows of a shard by table, except empty tables."""
        wanted = HashRange.of_shard(shard, self._shards)
        for table, schema in self.tables.items():
            if is_by_time(schema):
                runs = self._timers_by_shard(table).pop(shard, [])
                if runs:
                    yield table, merge_runs(runs, drop_deletes=True)
                continue
            mine = [self._piece(piece).slice(wanted.first, wanted.last) for piece in self._needed(table, shard)]
            if found := [run for run in mine if len(run)]:
                yield table, join_runs(found)

    def _in_order(self) -> Iterator[Piece]:
        """Yield the pieces in order of use: all timers of a table together, a piece shared by shards once."""
        last: dict[str, Piece] = {}
        for shard in self._wanted:
            for table, schema in self.tables.items():
                if not is_by_time(schema):
                    needed = self._needed(table, shard)
                    yield from needed[1:] if needed[:1] == [last.get(table)] else needed
                    if needed:
                        last[table] = needed[-1]
                elif shard == self._wanted[0]:
                    yield from self._pieces[table]

    def _needed(self, table: str, shard: int) -> list[Piece]:
        pieces, wanted = self._pieces[table], HashRange.of_shard(shard, self._shards)
        begin = bisect_left(pieces, wanted.first, key=lambda piece: piece.last_hash)
        return pieces[begin : bisect_right(pieces, wanted.last, key=lambda piece: piece.first_hash)]

    def _piece(self, piece: Piece) -> Run:
        if piece.table not in self._last or self._last[piece.table][0] != piece:
            self._last[piece.table] = next(self._read)
        found, run = self._last[piece.table]
        assert found == piece
        return run

    def _timers_by_shard(self, table: str) -> dict[int, list[Run]]:
        if table not in self._timers:
            found: dict[int, list[Run]] = {}
            for _, run in islice(self._read, len(self._pieces[table])):
                for shard, timers in _by_shard(run, self._shards, self._wanted):
                    found.setdefault(shard, []).append(timers)
            self._timers[table] = found
        return self._timers[table]


def _by_shard(run: Run, shards: int, wanted: range) -> Iterator[tuple[int, Run]]:
    """Yield the wanted shards' timers, each shard's ordered by time."""
    of_rows = shards_of(hashes_of_keys(run), shards) - wanted.start
    mine = np.flatnonzero((of_rows >= 0) & (of_rows < len(wanted)))
    of_mine = of_rows[mine].astype(np.min_scalar_type(len(wanted)))  # NumPy sorts 16-bit integers in linear time
    rows = take(run.batch, mine[np.argsort(of_mine, kind="stable")])
    ends = np.cumsum(np.bincount(of_mine, minlength=len(wanted))).tolist()
    for shard, (begin, end) in zip(wanted, pairwise([0, *ends]), strict=True):
        if begin < end:
            yield shard, Run(run.schema, rows.slice(begin, end - begin))
