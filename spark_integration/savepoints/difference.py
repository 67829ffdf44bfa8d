"""How two savepoints differ, operator by operator and key by key.

Both are read range by range of the hash, so that memory follows the larger number of shards, not the state. Values are
compared as their stored bytes: -0.0 is not 0.0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from holdfast.backends.arrow.rows import take
from holdfast.backends.arrow.values import python_rows
from holdfast.backends.evolution import evolved
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import SchemaMismatchError
from holdfast.snapshotter.savepoints.manifest import SavedOperator, Savepoint
from holdfast.snapshotter.savepoints.savepoints import read_piece
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.version_reader import no_rows
from holdfast.spark_integration.lookup.stored_query import ADDED, CHANGED, REMOVED, differing
from holdfast.spark_integration.savepoints.restoring_shards import HashRange, joined
from holdfast.spark_integration.timers import is_by_time


@dataclass
class TableDifference:
    """How a table of an operator differs.

    Attributes
    ----------
    operator, table : str
    columns : str
        Why rows cannot be compared; empty if they can.
    equal, added, removed, changed : int
        Keys.
    keys : dict of str to list
        By ``added``, ``removed`` and ``changed`` the first of these keys, as rows of the key columns.
    """

    operator: str
    table: str
    columns: str = ""
    equal: int = 0
    added: int = 0
    removed: int = 0
    changed: int = 0
    keys: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {ADDED: [], REMOVED: [], CHANGED: []})

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return bool(self.columns or self.added or self.removed or self.changed)


@dataclass(frozen=True)
class Side:
    """A savepoint and its folder."""

    savepoint: Savepoint
    folder: PrefixedStorage

    @property
    def operators(self) -> dict[str, SavedOperator]:
        """The operators by name."""
        return {operator.name: operator for operator in self.savepoint.operators}


def facts_that_differ(before: Savepoint, after: Savepoint) -> list[str]:
    """Return, in words, how two savepoints differ apart from their state."""
    names = [{operator.name for operator in one.operators} for one in (before, after)]
    lines = [f"operator {name} is only in {before.name}" for name in sorted(names[0] - names[1])]
    lines += [f"operator {name} is only in {after.name}" for name in sorted(names[1] - names[0])]
    if before.query.query_id != after.query.query_id:
        lines.append(f"they are of two queries: {before.query.query_id}, {after.query.query_id}")
    if before.query.next_watermark_ms != after.query.next_watermark_ms:
        lines.append(f"watermark: {before.query.next_watermark_ms}, {after.query.next_watermark_ms} ms")
    offsets = [{source.name: source.offset for source in one.query.sources} for one in (before, after)]
    for name in dict.fromkeys([*offsets[0], *offsets[1]]):
        if offsets[0].get(name) != offsets[1].get(name):
            lines.append(f"source {name}: {offsets[0].get(name, 'none')}, {offsets[1].get(name, 'none')}")
    for name in sorted(names[0] & names[1]):
        shards = [next(o.shards for o in one.operators if o.name == name) for one in (before, after)]
        if shards[0] != shards[1]:
            lines.append(f"shards of {name}: {shards[0]}, {shards[1]}")
    return lines


def difference(before: Side, after: Side, keys_each: int = 0) -> Iterator[TableDifference]:
    """Yield the differences of tables in both savepoints, with up to `keys_each` keys of each kind."""
    for name, one in before.operators.items():
        other = after.operators.get(name)
        if other is None:
            continue
        for table in dict.fromkeys([*one.tables, *other.tables]):
            schemas = [operator.tables[table] for operator in (one, other) if table in operator.tables]
            if is_by_time(schemas[0]):
                continue  # says what other tables say, in another order
            found = TableDifference(name, table)
            try:
                _compare(found, before, after, _both(schemas[0], schemas[-1]), keys_each)
            except SchemaMismatchError as exc:
                found.columns = str(exc)
            yield found


def _both(one: TableSchema, other: TableSchema) -> TableSchema:
    """Return a table that holds the rows of both."""
    try:
        return evolved(one, other)
    except SchemaMismatchError:
        return evolved(other, one)


def _compare(found: TableDifference, before: Side, after: Side, schema: TableSchema, keys_each: int) -> None:
    sides = [(side, side.operators[found.operator]) for side in (before, after)]
    shards = max(operator.shards for _, operator in sides)
    rows = [_Rows(side.folder, operator, schema) for side, operator in sides]
    for shard in range(shards):
        wanted = HashRange.of_shard(shard, shards)
        one, other = (of_side.of(wanted) for of_side in rows)
        if len(one) or len(other):
            _count(found, one, other, keys_each)


class _Rows:
    """The rows of a table of one side, asked for range by range, ascending: a piece that ranges share is read once."""

    def __init__(self, folder: PrefixedStorage, operator: SavedOperator, schema: TableSchema) -> None:
        self._folder, self._operator, self._schema = folder, operator.name, schema
        self._stored = operator.tables.get(schema.name, schema)
        self._pieces = sorted(operator.of_table(schema.name), key=lambda piece: piece.first_hash)
        self._first_hashes = [piece.first_hash for piece in self._pieces]
        # The first piece that may have rows of a range to come, and by key the pieces of the range before.
        self._begin = 0
        self._read: dict[str, Run] = {}
        self._none = no_rows(schema)

    def of(self, wanted: HashRange) -> Run:
        """Return the rows whose hashes are in a range."""
        while self._begin < len(self._pieces) and self._pieces[self._begin].last_hash < wanted.first:
            self._begin += 1
        end = bisect_right(self._first_hashes, wanted.last)
        needed = [piece for piece in self._pieces[self._begin : end] if piece.last_hash >= wanted.first]
        self._read = {piece.key: self._read[piece.key] for piece in needed if piece.key in self._read}
        for piece in needed:
            if piece.key not in self._read:
                self._read[piece.key] = read_piece(self._folder, self._operator, piece, self._stored)
        run = joined([self._read[piece.key].slice(wanted.first, wanted.last) for piece in needed], self._operator)
        return self._none if run is None else run.projected(self._schema)


def _count(found: TableDifference, one: Run, other: Run, keys_each: int) -> None:
    rows = differing(one, other)
    of_kinds = ((REMOVED, one, rows.removed), (CHANGED, one, rows.changed), (ADDED, other, rows.added))
    for kind, run, of_kind in of_kinds:
        setattr(found, kind, getattr(found, kind) + len(of_kind))
        some = of_kind[: max(0, keys_each - len(found.keys[kind]))]
        if len(some):
            found.keys[kind] += python_rows(take(run.keys, pa.array(some)))
    found.equal += rows.equal
