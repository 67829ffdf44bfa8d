"""Value state of a processor: one row for each key, fetched at the first read of a slab and written at its end."""

from __future__ import annotations

from typing import Any

import numpy as np
from pyspark.sql.streaming.stateful_processor import ValueState

from holdfast.mvcc import Transaction
from holdfast.spark_integration.processor.state.slab import MissingSlab, Slab
from holdfast.spark_integration.processor.state.state_rows import State, StateRows
from holdfast.spark_integration.tables.key_rows import ExpiringKeyRows, Expiry, KeyRows, open_rows


class ProcessorValueState(ValueState):
    """One variable in one call of a shard; methods as Spark documents them.

    `expiry`: None where values stay until they are cleared.
    """

    def __init__(
        self, transaction: Transaction, table: str, expiry: Expiry | None, rows: StateRows, slab: Slab
    ) -> None:
        # Not Spark's __init__, which takes a client of Spark's state server.
        self._transaction = transaction
        self._table = table
        self._expiry = expiry
        self._rows = rows
        self._slab: Slab = slab
        self.begin()

    def begin(self) -> None:
        """Forget the last slab; its changes were written."""
        self._changed: dict[int, State | None] = {}
        self._opened: KeyRows | ExpiringKeyRows | None = None
        self._stored: list[State | None] | None = None

    def drop(self, name: str) -> None:
        """Refuse all use from now on: the variable of this name was deleted after it was declared."""
        self._slab = MissingSlab(name)

    def exists(self) -> bool:
        return self._get("checking value state exists") is not None

    def get(self) -> State | None:
        value = self._get("getting value state")
        return None if value is None else self._rows.copy(value)

    def update(self, newValue: Any) -> None:
        at = self._slab.current("updating value state")
        self._changed[at] = self._rows.given(newValue)

    def clear(self) -> None:
        self._changed[self._slab.current("clearing value state")] = None

    def _get(self, doing: str) -> State | None:
        at = self._slab.current(doing)
        if at in self._changed:
            written = self._changed[at]
            return None if written is None else self._rows.as_read(written)
        if self._stored is None:
            self._opened = self._open()
            found = self._opened.get()
            values = self._rows.values.to_tuples(found.values)
            self._stored = [
                value if exists else None for value, exists in zip(values, found.exists.tolist(), strict=True)
            ]
        return self._stored[at]

    def _open(self) -> KeyRows | ExpiringKeyRows:
        return open_rows(self._transaction, self._table, self._expiry, self._slab.keys)

    def flush(self) -> None:
        """Write the slab's changes.

        Raises `StateValueError` if a value does not fit its column; ``row`` is the place of its key in the slab.
        """
        if not self._changed:
            return
        put = {at: value for at, value in self._changed.items() if value is not None}
        gone = [at for at, value in self._changed.items() if value is None and self._may_exist(at)]
        # What was fetched knows the index of what expires.
        rows = self._open() if self._opened is None else self._opened
        if put:
            with self._rows.placed(list(put)):
                values = self._rows.values.to_arrow(list(put.values()))
            rows.put(values, np.array(list(put), np.int64))
        if gone:
            rows.delete(np.array(gone, np.int64))

    def _may_exist(self, at: int) -> bool:
        return self._stored is None or self._stored[at] is not None
