"""Sorts a shard's rows by key, in the order in which the keys are called: ascending, as Spark sorts them.

Null comes first and NaN last; arrays have some fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import IntArray, order_rows, sortable, take
from holdfast.backends.run import Keys

_LARGEST = np.int64(np.iinfo(np.int64).max)


class KeyOrder(NamedTuple):
    """Rows sorted by key; rows of one key keep their order of arrival."""

    rows: IntArray  #: Row numbers in sorted order
    starts: IntArray  #: Where in `rows` each key begins

    @classmethod
    def of(cls, keys: Keys) -> KeyOrder:
        """Sort rows by their keys.

        Groups the rows by hash first, then sorts only the distinct keys by value.
        """
        by_hash = order_rows(keys.hashes, keys.columns)
        starts = np.flatnonzero(by_hash.first)
        ascending = _sort(take(keys.columns, by_hash.rows[starts]))
        sizes = np.diff(np.append(starts, len(by_hash.rows)))[ascending]
        new_starts = np.cumsum(sizes) - sizes
        places = np.arange(len(by_hash.rows)) + np.repeat(starts[ascending] - new_starts, sizes)
        return cls(by_hash.rows[places], new_starts)

    def first_rows(self, first_key: int, keys: int) -> IntArray:
        """Return the first row of each of `keys` consecutive keys."""
        return self.rows[self.starts[first_key : first_key + keys]]


def _sort(keys: pa.RecordBatch) -> IntArray:
    columns = [part for column in keys.columns for part in _sortable(column)]
    if not columns:
        return np.arange(keys.num_rows)
    names = [str(i) for i in range(len(columns))]
    by = [(name, "ascending") for name in names]
    order: IntArray = pc.sort_indices(pa.table(columns, names=names), sort_keys=by).to_numpy().astype(np.int64)
    return order


def _sortable(column: pa.Array) -> Iterator[pa.Array]:
    """Yield columns that Arrow sorts the way Spark sorts this one."""
    t = column.type
    if pa.types.is_null(t):
        return
    if column.null_count:
        yield column.is_valid()  # false sorts before true
    if pa.types.is_struct(t):
        for part in column.flatten():
            yield from _sortable(part)
    elif pa.types.is_nested(t):
        yield from sortable(column)
    elif pa.types.is_floating(t):
        yield _sortable_floats(column)
    else:
        yield column


def _sortable_floats(column: pa.Array) -> pa.Array:
    """Return floats as integers in the same order, NaN last; Arrow itself would put NaN next to null."""
    bits = column.cast(pa.float64()).fill_null(0.0).to_numpy().view(np.int64)
    ordered = np.where(bits < 0, bits ^ _LARGEST, bits)
    return pa.array(ordered, mask=column.is_null().to_numpy(zero_copy_only=False))
