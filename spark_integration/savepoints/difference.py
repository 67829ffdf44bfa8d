"""Compares two savepoints by operator and key.

Both savepoints are read one hash range at a time, so memory use falls with the larger number of shards. Values are
compared by their stored bytes: -0.0 differs from 0.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from holdfast.backends.arrow.rows import take
from holdfast.backends.arrow.values import python_rows
from holdfast.backends.evolution import evolved
from holdfast.backends.run import Run, TableSchema
from holdfast.errors import SchemaMismatchError
from holdfast.snapshotter.savepoints.manifest import SavedOperator, Savepoint
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.version_reader import no_rows
from holdfast.spark_integration.lookup.stored_query import ADDED, CHANGED, REMOVED, differing
from holdfast.spark_integration.savepoints.restoring_shards import PieceRows
from holdfast.spark_integration.timers import is_by_time


@dataclass
class TableDifference:
    """How an operator's table differs between two savepoints."""

    operator: str
    table: str
    columns: str = ""  #: Why the rows are not comparable; empty if they are
    #: Numbers of keys
    equal: int = 0
    added: int = 0
    removed: int = 0
    changed: int = 0
    #: The first keys under ``added``, ``removed`` and ``changed``, as rows of the key columns
    keys: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {ADDED: [], REMOVED: [], CHANGED: []})

    @property
    def differs(self) -> bool:
        return bool(self.columns or self.added or self.removed or self.changed)


@dataclass(frozen=True)
class Side:
    """One of the compared savepoints, and its folder."""

    savepoint: Savepoint
    folder: PrefixedStorage

    @property
    def operators(self) -> dict[str, SavedOperator]:
        return {operator.name: operator for operator in self.savepoint.operators}


def facts_that_differ(before: Savepoint, after: Savepoint) -> list[str]:
    """Describe how two savepoints differ, apart from their state."""
    names = [{operator.name for operator in one.operators} for one in (before, after)]
    lines = [f"operator {name} is only in {before.name}" for name in sorted(names[0] - names[1])]
    lines += [f"operator {name} is only in {after.name}" for name in sorted(names[1] - names[0])]
    if before.query.query_id != after.query.query_id:
        lines.append(f"different queries: {before.query.query_id}, {after.query.query_id}")
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
    """Yield the difference of each table, with up to `keys_each` keys of each kind."""
    for name in before.operators:
        if name in after.operators:
            yield from _of_operator(name, before, after, keys_each)


def _of_operator(name: str, before: Side, after: Side, keys_each: int) -> list[TableDifference]:
    operators = [side.operators[name] for side in (before, after)]
    found: dict[str, TableDifference] = {}
    comparable: dict[str, TableSchema] = {}
    for table in dict.fromkeys(table for operator in operators for table in operator.tables):
        schemas = [operator.tables[table] for operator in operators if table in operator.tables]
        if is_by_time(schemas[0]):
            continue  # an index, which repeats another table in a different order
        found[table] = TableDifference(name, table)
        try:
            comparable[table] = _both(schemas[0], schemas[-1])
        except SchemaMismatchError as exc:
            found[table].columns = str(exc)
    shards = max(operator.shards for operator in operators)
    with ExitStack() as stack:
        rows = []
        for side, operator in zip((before, after), operators, strict=True):
            tables = {table: schema for table, schema in operator.tables.items() if table in comparable}
            read = PieceRows(side.folder, name, tables, operator.pieces, shards, range(shards))
            rows.append(stack.enter_context(closing(read)))
        for shard in range(shards):
            tables_of = [dict(of_side.of_shard(shard)) for of_side in rows]
            for table, schema in comparable.items():
                if any(table in tables for tables in tables_of):
                    one, other = (of[table].projected(schema) if table in of else no_rows(schema) for of in tables_of)
                    _count(found[table], one, other, keys_each)
    return [*found.values()]


def _both(one: TableSchema, other: TableSchema) -> TableSchema:
    """Return a schema that fits the rows of both tables."""
    try:
        return evolved(one, other)
    except SchemaMismatchError:
        return evolved(other, one)


def _count(found: TableDifference, one: Run, other: Run, keys_each: int) -> None:
    rows = differing(one, other)
    of_kinds = ((REMOVED, one, rows.removed), (CHANGED, one, rows.changed), (ADDED, other, rows.added))
    for kind, run, of_kind in of_kinds:
        setattr(found, kind, getattr(found, kind) + len(of_kind))
        some = of_kind[: max(0, keys_each - len(found.keys[kind]))]
        if len(some):
            found.keys[kind] += python_rows(take(run.keys, pa.array(some)))
    found.equal += rows.equal
