"""Value state: one row of Python values per key, read and written for many keys at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.backends.run import Keys
from holdfast.mvcc import Transaction
from holdfast.spark_integration.keyed.python_values import RowValues
from holdfast.spark_integration.tables.key_rows import Expiry, open_rows


class ValueState:
    """The values of one state variable in one transaction.

    `rows` converts between the table's value columns and Python's values.

    Threads: one at a time, like the transaction. Reads see earlier writes.
    """

    def __init__(self, transaction: Transaction, table: str, rows: RowValues, expiry: Expiry | None = None) -> None:
        self._transaction = transaction
        self._table = table
        self._rows = rows
        self._expiry = expiry

    def get(self, keys: Keys) -> list[tuple[Any, ...] | None]:
        """Return each key's value, or None."""
        found = open_rows(self._transaction, self._table, self._expiry, keys).get()
        if found.exists.all():
            return list(self._rows.to_tuples(found.values))
        values = self._rows.to_tuples(found.values)
        return [value if exists else None for value, exists in zip(values, found.exists.tolist(), strict=True)]

    def put(self, keys: Keys, values: Sequence[tuple[Any, ...]]) -> None:
        """Set the value of each key.

        Raises `StateValueError` if a value does not fit the columns; the error's ``row`` is its index in `values`.
        """
        if values:
            open_rows(self._transaction, self._table, self._expiry, keys).put(self._rows.to_arrow(values))

    def delete(self, keys: Keys) -> None:
        """Remove the value of each key."""
        if len(keys):
            self._transaction.delete(self._table, keys)
