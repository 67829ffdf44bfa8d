"""Transactions of the machines of this folder: what they write, each beside what the model says it sees."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from holdfast.mvcc import Transaction
from holdfast.testing.state_rows import Row, plain, values_of
from tests.model.universe import State, Table

Writes = tuple[Table, list[tuple[Row, Row | None]]]
"""Rows of one table, each with its value; None deletes."""


def writes_to(table: Table) -> st.SearchStrategy[Writes]:
    """A few rows, or many."""
    row = st.tuples(st.sampled_from(table.rows), st.one_of(st.none(), st.sampled_from(table.values)))
    return st.tuples(st.just(table), st.one_of(st.lists(row, max_size=2), st.lists(row, min_size=8, max_size=15)))


def prefixes_to(table: Table) -> st.SearchStrategy[list[Row]]:
    """Rows whose first column is a prefix to delete."""
    return st.lists(st.sampled_from(table.rows), max_size=2)


class Open:
    """A transaction, and what the model says it sees."""

    def __init__(self, transaction: Transaction, state: State) -> None:
        self.transaction = transaction
        self.state = dict(state)
        self.has_written = False

    def write(self, table: Table, rows: list[tuple[Row, Row | None]]) -> None:
        """Put and delete rows; of one key, what comes last counts."""
        for is_delete, group in itertools.groupby(rows, lambda row: row[1] is None):
            stretch = list(group)
            keys = table.keys([key for key, _ in stretch])
            if is_delete:
                self.transaction.delete(table.name, keys)
            else:
                values = values_of(table.schema, [value for _, value in stretch])
                self.transaction.put(table.name, keys, values)
        for key, value in rows:
            if value is None:
                self.state.pop((table.name, plain(key)), None)
            else:
                self.state[table.name, plain(key)] = plain(value)
        self.has_written |= bool(rows)

    def delete_prefix(self, table: Table, rows: list[Row]) -> None:
        """Delete all that begins as one of `rows`, in the first column."""
        going = table.with_prefixes(self.state, rows, 1)
        self.transaction.delete_prefix(table.name, table.prefixes(rows, 1))
        for key in going:
            del self.state[table.name, key]
        self.has_written |= bool(going)
