"""State of one shard's keys in one micro-batch, for a vectorised function."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.options import did_you_mean
from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.spark_types import owned
from holdfast.spark_integration.tables.key_rows import ExpiringKeyRows, KeyRows
from holdfast.spark_integration.vectorised.arrays import array_of, rows_where, seen, without_views


class ShardState:
    """State of the micro-batch's keys, read and written for all of them at once.

    Rows are in the order of `ShardBatch.keys`. Reads see earlier writes. Writes are kept only if the whole
    micro-batch succeeds.
    """

    def __init__(self, rows: KeyRows | ExpiringKeyRows, schema: pa.Schema) -> None:
        self._rows = rows
        self._schema = schema

    def get(self, default: object = None) -> pa.Table:
        """Return the state: one row per key, all null if the key has none.

        Parameters
        ----------
        default : value or mapping of str to value, optional
            What stands where null would: in every column, or in those that are named.

        Returns
        -------
        pyarrow.Table
            Shape (keys, state columns).

        Raises
        ------
        InvalidArgumentError
            One column has more than 2 GiB of text, bytes or elements, more than an Arrow array holds; or a default does
            not fit its column.
        """
        values = seen(self._rows.get().values, self._schema, "state column")
        return values if default is None else _filled(values, default)

    def exists(self) -> pa.Array:
        """Return for each key whether it has state, even if it is all null."""
        return pa.array(self._rows.get().exists)

    def put(self, table: pa.Table | None = None, /, *, where: object = None, **columns: object) -> None:
        """Set the state of every key, or of those where `where` is true, to the current values of the columns.

        Parameters
        ----------
        table : pyarrow.Table, optional
            The state columns, one row per key. Or pass each column by name.
        where : array of bool, shape (keys,), optional
            Keys whose state to set; null counts as false.
        **columns : array, shape (keys,)
            Every state column, by name; one named ``where`` can only be passed in a table.

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
        if table.num_rows != len(self._rows):
            raise InvalidArgumentError(
                "state must have one row for each key", rows=table.num_rows, keys=len(self._rows)
            )
        rows = None
        if where is None:
            own = [owned(column) for column in table.columns]
        else:
            rows = rows_where(where, len(self._rows))
            own = [without_views(column).take(pa.array(rows)) for column in table.columns]
        self._rows.put(pa.table(own, names=table.schema.names), rows)

    def delete(self, where: object = None) -> None:
        """Remove the state of every key, or of those where `where` is true."""
        self._rows.delete(None if where is None else rows_where(where, len(self._rows)))

    def _table(self, columns: dict[str, object]) -> pa.Table:
        if sorted(columns) != sorted(self._schema.names):
            raise SchemaMismatchError(
                "state must be given with all its columns and no others",
                missing=sorted(set(self._schema.names) - set(columns)),
                unexpected=sorted(set(columns) - set(self._schema.names)),
            )
        return pa.table(
            {name: array_of(columns[name], f"state column {name!r}", len(self._rows)) for name in self._schema.names}
        )


def _filled(values: pa.Table, default: object) -> pa.Table:
    """Return columns with a default in place of null."""
    names = values.schema.names
    defaults = default if isinstance(default, Mapping) else dict.fromkeys(names, default)
    for name, value in defaults.items():
        if name not in names:
            raise InvalidArgumentError(f"default names no state column: {name!r}{did_you_mean(name, names)}")
        column = values.column(name)
        try:
            filled = pc.coalesce(column, pa.scalar(value, column.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
            raise InvalidArgumentError(
                f"default {value!r} is no value of state column {name!r}: give one by column, as in "
                "get(default={'n': 0})",
                type=str(column.type),
            ) from exc
        values = values.set_column(names.index(name), values.schema.field(name), filled)
    return values
