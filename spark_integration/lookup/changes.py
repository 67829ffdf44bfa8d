"""How two versions of a table differ, key by key; by the writes between them if these are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.python_rows import python_rows
from holdfast.backends.arrow.rows import IntArray, take, to_bools
from holdfast.backends.rocksdb.codec.rows import encode_values
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.spark_integration.lookup.shard_readers import ShardReaders, no_rows
from holdfast.spark_integration.shard.pointer_row import PointerRow

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
#: So many keys are looked up on either side; for more, both are read.
_KEYS_MAX = 10_000
Side = tuple[str, PointerRow] | None
"""The directory and the pointer of a shard; None if it was never called."""


@dataclass(frozen=True)
class RowChange:
    """A key whose row differs."""

    kind: str
    key: dict[str, Any]  #: Its key columns
    #: Its value columns; None if it has no row
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class Differing(NamedTuple):
    """The rows of two runs that differ."""

    removed: IntArray  #: Of the first run
    #: Of both runs
    changed: IntArray
    changed_to: IntArray
    added: IntArray  #: Of the second run
    equal: int  #: How many do not


def differing(before: Run, after: Run) -> Differing:
    """Compare two runs of one schema, key by key, by the stored bytes of their values: -0.0 is not 0.0."""
    at = after.find(Keys(before.hashes, before.keys))
    in_both = np.flatnonzero(at >= 0)
    values = [encode_values(take(r.values, pa.array(n))) for r, n in ((before, in_both), (after, at[in_both]))]
    changed = in_both[to_bools(pc.not_equal(*values))]
    is_new = np.ones(len(after), np.bool_)
    is_new[at[in_both]] = False
    equal = len(in_both) - len(changed)
    return Differing(np.flatnonzero(at < 0), changed, at[changed], np.flatnonzero(is_new), equal)


@dataclass
class TableChanges:
    """How a table differs."""

    table: str
    #: Keys
    added: int = 0
    removed: int = 0
    changed: int = 0
    rows: list[RowChange] = field(default_factory=list)  #: Some of them

    def take(self, before: Run, after: Run, rows_max: int) -> None:
        """Compare two runs of one schema: count what differs, and keep so many rows in all."""
        found = differing(before, after)
        self.removed += len(found.removed)
        self.changed += len(found.changed)
        self.added += len(found.added)
        self._keep(CHANGED, before, found.changed, after, found.changed_to, rows_max)
        self._keep(ADDED, None, None, after, found.added, rows_max)
        self._keep(REMOVED, before, found.removed, None, None, rows_max)

    def _keep(
        self,
        kind: str,
        before: Run | None,
        old: IntArray | None,
        after: Run | None,
        new: IntArray | None,
        rows_max: int,
    ) -> None:
        room = max(0, rows_max - len(self.rows))
        sides = [
            None if run is None or rows is None else (_rows(run.keys, rows[:room]), _rows(run.values, rows[:room]))
            for run, rows in ((before, old), (after, new))
        ]
        keys = next(side[0] for side in sides if side is not None)
        values = [side[1] if side is not None else [None] * len(keys) for side in sides]
        self.rows += [RowChange(kind, *facts) for facts in zip(keys, *values, strict=True)]


def _rows(columns: pa.RecordBatch, rows: IntArray) -> list[dict[str, Any]]:
    return python_rows(take(columns, pa.array(rows)))


def compare(
    readers: ShardReaders, changes: TableChanges, table: TableSchema, sides: tuple[Side, Side], rows_max: int
) -> None:
    """Add the differences of one shard's table to `changes`.

    Raises `StateLostError`, `CorruptionError` or `UnavailableError` if a version cannot be read.
    """
    one, other = sides
    if one and other and one[1].pointer == other[1].pointer:
        return
    if one and other and one[0] == other[0] and one[1].pointer and other[1].pointer:
        directory, stored = other[0], readers.tables(other[0])
        if table.name in stored.held:
            keys = readers.written_between(directory, one[1], other[1], stored, table.name)
            if keys is not None and len(keys) <= _KEYS_MAX:
                found = [readers.find(directory, row, stored, table, keys) for row in (one[1], other[1])]
                changes.take(found[0], found[1], rows_max)
                return
    changes.take(_all(readers, table, one), _all(readers, table, other), rows_max)


def _all(readers: ShardReaders, table: TableSchema, side: Side) -> Run:
    if side is None or side[1].pointer is None:
        return no_rows(table)
    stored = readers.tables(side[0])
    return readers.all_rows(*side, stored, table) if table.name in stored.held else no_rows(table)
