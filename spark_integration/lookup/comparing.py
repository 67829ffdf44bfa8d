"""How a shard's state differs between two versions, by the writes between them if known."""

from __future__ import annotations

from holdfast.backends.run import Run, TableSchema
from holdfast.spark_integration.lookup.changes import TableChanges
from holdfast.spark_integration.lookup.shard_readers import ShardReaders, no_rows
from holdfast.spark_integration.shard.pointer_row import PointerRow

#: So many keys are looked up on either side; for more, both are read.
_KEYS_MAX = 10_000
Side = tuple[str, PointerRow] | None
"""The directory and the pointer of a shard; None if it was never called."""


def compare(
    readers: ShardReaders, changes: TableChanges, table: TableSchema, sides: tuple[Side, Side], rows_max: int
) -> None:
    """Add the differences of one shard's table to `changes`.

    Raises
    ------
    StateLostError, CorruptionError, UnavailableError
        A version cannot be read.
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
