"""How rows of one key are ranked: by some columns, each ascending or descending, as Spark sorts them.

Null stands below everything and NaN above all numbers; ``-0.0`` is ``0.0``. Rows that are equal in all columns stay as
they were: the one that came first stands first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import IntArray, RowOrder, normalize_keys, one_chunk, storage_type
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.vectorised.arrays import without_views


@dataclass(frozen=True)
class Ranking:
    """Columns to rank by."""

    columns: tuple[str, ...]
    ascending: tuple[bool, ...]  #: For each, whether its smallest value stands first

    @property
    def definition(self) -> str:
        """What a restart must not change."""
        pairs = zip(self.columns, self.ascending, strict=True)
        return ", ".join(f"{name} {'asc' if ascends else 'desc'}" for name, ascends in pairs)

    def taken(self, stored: pa.RecordBatch, rows: pa.Table) -> pa.Table:
        """Return the columns of stored rows and, behind them, of new ones."""
        own = rows.select(self.columns)
        new = [without_views(column).cast(storage_type(column.type)) for column in own.columns]
        old = pa.Table.from_batches([stored.select(self.columns)])
        return pa.concat_tables([old, pa.Table.from_arrays(new, schema=old.schema)])

    def order(self, key: IntArray, rows: pa.Table) -> RowOrder:
        """Return rows by key and, of one key, by rank.

        `key` is the number of each row's key.
        """
        signs = [1 if ascends else -1 for ascends in self.ascending]
        by = [sign * ranks(rows.column(name)) for name, sign in zip(self.columns, signs, strict=True)]
        order = np.lexsort([*reversed(by), key])
        first = np.ones(len(order), np.bool_)
        first[1:] = key[order[1:]] != key[order[:-1]]
        return RowOrder(order, first)


def ranks(column: pa.Array | pa.ChunkedArray) -> IntArray:
    """Return numbers in the order of values, equal for equal ones; 0 for null.

    Raises `InvalidArgumentError` if values of this type have no order.
    """
    values = normalize_keys(one_chunk(column))
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    try:
        found: IntArray = pc.rank(values, tiebreaker="dense").to_numpy().astype(np.int64)
    except pa.ArrowNotImplementedError as exc:
        raise InvalidArgumentError("values of this type have no order", type=str(values.type)) from exc
    found[values.is_null().to_numpy(zero_copy_only=False)] = 0  # Arrow ranks null last
    return found
