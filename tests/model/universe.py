"""What the machines of this folder have in common: tables with few keys, and every read against a plain dictionary.

A state is a dictionary from (table, key) to value. Keys are few, so that they meet again; a key's hash comes from its
first column, so that rows of one prefix share it, as map entries do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.backends.base import View
from holdfast.backends.run import Keys, TableSchema
from holdfast.mvcc import Transaction
from holdfast.testing.state_rows import COUNTS, TYPES, VALUE_TYPES, Row, answers, contents, hash_of, keys_of, plain

State = dict[tuple[str, Row], Row]
"""(table, plain key) → plain value."""

_LARGEST = 2**64 - 1
FEW_HASHES = (0, 2**63, _LARGEST)
RANGES = ((0, _LARGEST), (0, 2**63 - 1), (2**63, 2**63), (2**62, _LARGEST), (1, 0))


@dataclass(frozen=True)
class Table:
    """A table, the keys and values that tests write into it, and how its keys are hashed."""

    schema: TableSchema
    rows: Sequence[Row]
    values: Sequence[Row]
    hash_first: Callable[[Row], int]

    @property
    def name(self) -> str:
        return self.schema.name

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.name)  # in the steps that hypothesis shows

    def hash(self, row: Row) -> int:
        return self.hash_first(plain(row[:1]))

    def keys(self, rows: Sequence[Row]) -> Keys:
        return keys_of(self.schema, rows, [self.hash(row) for row in rows])

    def prefixes(self, rows: Sequence[Row], columns: int) -> Keys:
        """Return the first so many columns of `rows`."""
        cut = [row[:columns] for row in rows]
        return keys_of(self.schema.prefix(columns), cut, [self.hash(row) for row in rows])

    def written(self, state: State) -> dict[Row, Row]:
        """Return the rows that a state has in this table."""
        return {key: value for (table, key), value in state.items() if table == self.name}

    def with_prefixes(self, state: State, rows: Sequence[Row], columns: int) -> dict[Row, Row]:
        """Return the rows of a state that begin as one of `rows`."""
        cut = {plain(row[:columns]) for row in rows}
        return {key: value for key, value in self.written(state).items() if key[:columns] in cut}


_NAMES: list[str | None] = [None, "", *"abcdef"]
_ENTRIES = TableSchema.of(
    "entries",
    pa.schema([("user", pa.string()), ("entry", pa.int64())]),
    pa.schema([("n", pa.int64()), ("note", pa.string())]),
)


def _few_hashes(first: Row) -> int:
    return FEW_HASHES[sum(map(ord, str(first))) % len(FEW_HASHES)]


COLLIDING = (
    Table(COUNTS, [(name,) for name in _NAMES], [(n,) for n in (None, *range(-3, 4))], _few_hashes),
    Table(
        _ENTRIES,
        [(name, entry) for name in _NAMES[:5] for entry in (None, -1, 2**40)],
        [(None, None), (0, ""), (-1, "ü" * 40)],
        _few_hashes,
    ),
)
"""Keys that share three hashes, so that almost every look-up meets a collision."""


def _table_of(number: int, keys: Sequence[Any], values: Sequence[Any]) -> Table:
    schema = TableSchema.of(
        f"types{number}",
        pa.schema([(f"k{i}", kind) for i, (kind, _, _) in enumerate(keys)]),
        pa.schema([(f"v{i}", kind) for i, (kind, _, _) in enumerate(values)]),
    )
    every = list(itertools.product(*((None, one, two) for _, one, two in keys)))
    choices = [tuple(side[i] for side in values) for i in (1, 2)]
    return Table(schema, every[:: 1 + len(every) // 9], [*choices, (None,) * len(values)], hash_of)


TYPED = tuple(
    _table_of(i, TYPES[i::5], [*TYPES[(i + 2) % 5 :: 5], VALUE_TYPES[i % len(VALUE_TYPES)]]) for i in range(5)
)
"""Keys and values of every type."""


def check_reads(reader: View | Transaction, table: Table, state: State) -> None:
    """Compare every way to read a table with what the model says."""
    expected = table.written(state)
    everyone = [*table.rows[::-1], *table.rows[:2]]
    assert contents(reader, table.name) == expected
    assert answers(reader, table.name, table.keys(everyone)) == [expected.get(plain(row)) for row in everyone]
    for first, last in RANGES:
        inside = {k: v for k, v in expected.items() if first <= table.hash_first(k[:1]) <= last}
        assert contents(reader, table.name, first, last) == inside
    for columns in {1, len(table.schema.key)}:
        wanted = [table.rows[-1], *table.rows[::3], table.rows[-1]]
        found = prefix_contents(reader, table.name, table.prefixes(wanted, columns))
        assert found == table.with_prefixes(state, wanted, columns)


def prefix_contents(reader: View | Transaction, table: str, prefixes: Keys) -> dict[Row, Row]:
    """Return what a scan by prefix yields; fails where it is not ascending or repeats a key."""
    found: dict[Row, Row] = {}
    last = 0
    for run in reader.scan_prefix(table, prefixes):
        for hashed, key, value in zip(run.hashes.tolist(), rows_of(run.keys), rows_of(run.values), strict=True):
            assert last <= hashed
            last = hashed
            assert key not in found
            found[key] = value
    return found


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """Return the rows of a batch as plain tuples."""
    return [plain([column[i].as_py() for column in batch.columns]) for i in range(batch.num_rows)]
