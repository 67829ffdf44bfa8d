"""What a vectorised operator function is called with: one shard's rows of one micro-batch, and its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import BoolArray, one_chunk, order_rows, take
from holdfast.backends.base import Found
from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.mvcc import Transaction
from holdfast.spark_integration.shard.operator import STATE_TABLE
from holdfast.spark_integration.spark_types import owned
from holdfast.spark_integration.vectorised.groups import Groups


class ShardState:
    """State of the micro-batch's keys, read and written for all of them at once.

    Rows are in the order of `ShardBatch.keys`. Reads see earlier writes. Writes are kept only if the whole
    micro-batch succeeds.
    """

    def __init__(self, transaction: Transaction, keys: Keys, schema: pa.Schema) -> None:
        self._transaction = transaction
        self._keys = keys
        self._schema = schema
        self._found: Found | None = None

    def _find(self) -> Found:
        if self._found is None:
            self._found = self._transaction.get(STATE_TABLE, self._keys)
        return self._found

    def get(self) -> pa.Table:
        """Return the state: one row per key, all null if the key has none.

        Returns
        -------
        pyarrow.Table
            Shape (keys, state columns).
        """
        return pa.Table.from_batches([self._find().values]).cast(self._schema)

    def exists(self) -> pa.Array:
        """Return for each key whether it has state, be it all null."""
        return pa.array(self._find().exists)

    def put(self, table: pa.Table | None = None, /, *, where: object = None, **columns: object) -> None:
        """Set the state of every key, or of those where `where` is true, to the current values of the columns.

        Parameters
        ----------
        table : pyarrow.Table, optional
            The state columns, one row per key. Or pass each column by name.
        where : array of bool, shape (keys,), optional
            Keys whose state to set; null counts as false.
        **columns : array, shape (keys,)
            Every state column, by name; one called ``where`` can only be passed in a table.

        Raises
        ------
        SchemaMismatchError
            A state column is missing or unknown, or a value does not fit its type.
        InvalidArgumentError
            Not one value per key, or neither a table nor columns.
        """
        if table is None:
            table = self._table(columns)
        elif columns:
            raise InvalidArgumentError("give the state as a table or by column, not both")
        elif not isinstance(table, (pa.Table, pa.RecordBatch)):
            raise InvalidArgumentError("state must be a pyarrow.Table, or given by column", given=type(table).__name__)
        if table.num_rows != len(self._keys):
            raise InvalidArgumentError(
                "state must have one row for each key", rows=table.num_rows, keys=len(self._keys)
            )
        if where is None:
            own = [owned(column) for column in table.columns]
            self._transaction.put(STATE_TABLE, self._keys, pa.table(own, schema=table.schema))
        else:
            rows = self._rows_where(where)
            self._transaction.put(STATE_TABLE, self._keys.take(rows), table.take(pa.array(rows)))
        self._found = None

    def delete(self, where: object = None) -> None:
        """Remove the state of every key, or of those where `where` is true."""
        keys = self._keys if where is None else self._keys.take(self._rows_where(where))
        self._transaction.delete(STATE_TABLE, keys)
        self._found = None

    def _table(self, columns: dict[str, object]) -> pa.Table:
        if sorted(columns) != sorted(self._schema.names):
            raise SchemaMismatchError(
                "state must be given with all its columns and no others",
                missing=sorted(set(self._schema.names) - set(columns)),
                unexpected=sorted(set(columns) - set(self._schema.names)),
            )
        return pa.table({name: self._array(columns[name], f"state column {name!r}") for name in self._schema.names})

    def _rows_where(self, where: object) -> np.ndarray:
        given = self._array(where, "where")
        if pa.types.is_null(given.type):
            given = given.cast(pa.bool_())
        if not pa.types.is_boolean(given.type):
            raise InvalidArgumentError("where must be boolean", given=str(given.type))
        mask: BoolArray = pc.fill_null(given, False).to_numpy(zero_copy_only=False)
        return np.flatnonzero(mask)

    def _array(self, values: Any, what: str) -> pa.Array:
        if not isinstance(values, (pa.Array, pa.ChunkedArray)):
            try:
                values = pa.array(values)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
                raise InvalidArgumentError(
                    f"{what} must be an array with one value for each key: {exc}", given=type(values).__name__
                ) from exc
        if len(values) != len(self._keys):
            raise InvalidArgumentError(
                f"{what} must have one value for each key", values=len(values), keys=len(self._keys)
            )
        return one_chunk(values)


@dataclass(frozen=True)
class ShardBatch:
    """One shard's part of a micro-batch, grouped by key.

    Attributes
    ----------
    rows : pyarrow.Table
        The input rows with all their columns, in no particular order.
    keys : pyarrow.Table
        The distinct keys of these rows, one row each.
    groups : Groups
        Reductions over each key's rows, and the key of each row.
    state : ShardState
        State of these keys, to read and write.
    shard : int
        Number of the shard.
    batch_id : int or None
        Spark's micro-batch; None in a batch query, and where Spark does not tell: in ``foreachBatch`` over Spark
        Connect, and in jobs started there by a thread of the user's own.
    watermark_ms : int or None
        Event-time watermark in ms since 1970; None if the input has none.
    """

    rows: pa.Table
    keys: pa.Table
    groups: Groups
    state: ShardState
    shard: int
    batch_id: int | None
    watermark_ms: int | None


def group_rows(
    rows: pa.Table, key_columns: pa.RecordBatch, hashes: np.ndarray, key_types: pa.Schema
) -> tuple[Keys, pa.Table, Groups]:
    """Group rows by key.

    Parameters
    ----------
    rows : pyarrow.Table, shape (n, columns)
    key_columns : pyarrow.RecordBatch, shape (n, key columns)
        Normalised, in storage types.
    hashes : numpy.ndarray of uint64, shape (n,)
    key_types : pyarrow.Schema
        In which the function sees keys.

    Returns
    -------
    tuple
        The distinct keys for look-ups, ascending by hash; the same keys as the function sees them; the groups.
    """
    order = order_rows(hashes, key_columns)
    first_rows = order.rows[order.first]
    keys = Keys(hashes[first_rows], take(key_columns, first_rows))
    shown = pa.Table.from_batches([keys.columns]).cast(key_types)
    return keys, shown, Groups(rows, order)
