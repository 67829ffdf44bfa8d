"""Sorts a shard's rows by key and cuts them into slabs: keys that are converted, looked up and written together.

Keys ascend in Spark's order: null first, NaN last; arrays have an arbitrary but fixed order. Slabs and pieces are
limited in rows and bytes, and slabs also in the bytes of state that their keys read and write. A key with more rows
than fit into one piece forms its own slab, whose rows are converted piece by piece as the function iterates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType, StructType

from holdfast.backends.arrow.rows import IntArray, order_rows, sortable, take, take_rows
from holdfast.backends.run import Keys
from holdfast.spark_integration.timers import AT_ONCE_BYTES, KeysAtOnce

_LARGEST = np.int64(np.iinfo(np.int64).max)
# A slab is in memory three times: as Arrow columns, as Python or pandas objects, and within the received rows.
SLAB_KEYS = 20_000
SLAB_ROWS = 65_536
SLAB_BYTES = AT_ONCE_BYTES
_MAY_BE_LARGE = (ArrayType, BinaryType, MapType, StringType, StructType)
P = TypeVar("P")


class KeyOrder(NamedTuple):
    """Rows sorted by key; rows of one key keep their order of arrival."""

    rows: IntArray  #: Row numbers in key order
    starts: IntArray  #: Index in `rows` of each key's first row

    @classmethod
    def of(cls, keys: Keys) -> KeyOrder:
        """Sort rows by key: group rows by hash, then sort only the distinct keys by value."""
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
    """Yield columns that Arrow sorts in Spark's order of this column."""
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
    """Map floats to integers in the same order, NaN last; Arrow would sort NaN next to null."""
    bits = column.cast(pa.float64()).fill_null(0.0).to_numpy().view(np.int64)
    ordered = np.where(bits < 0, bits ^ _LARGEST, bits)
    return pa.array(ordered, mask=column.is_null().to_numpy(zero_copy_only=False))


@cache
def at_once_of(operator: str, *rows: StructType, has_entries: bool = False) -> KeysAtOnce:
    """Return the operator's limit on keys per slab, which this worker adapts to the size of its state."""
    may_be_large = has_entries or any(isinstance(field.dataType, _MAY_BE_LARGE) for row in rows for field in row)
    return KeysAtOnce() if may_be_large else KeysAtOnce(SLAB_KEYS)


class KeySlabs(ABC, Generic[P]):
    """A shard's rows by key, in the pieces that a function sees; `starts` are indices in `order`.

    A key with more than `rows_each` rows, or with large rows, has several pieces.
    """

    def __init__(self, rows: pa.Table, order: IntArray, starts: IntArray, rows_each: int) -> None:
        self._batches = rows.to_batches()
        self._order = order
        self._bounds = np.append(starts, len(order))
        self._slab_rows = min(SLAB_ROWS, max(1, SLAB_BYTES * len(rows) // max(1, rows.nbytes)))
        self._rows_each = min(rows_each, self._slab_rows)

    @abstractmethod
    def cut(self, rows: pa.Table, bounds: IntArray) -> Iterator[Iterator[P]]:
        """Yield the pieces of each key; key i has rows ``bounds[i]`` to ``bounds[i + 1]``, exclusive."""

    @abstractmethod
    def convert(self, rows: pa.Table) -> Iterator[P]:
        """Convert rows of a single key to pieces."""

    def slabs(self, at_once: KeysAtOnce | None = None) -> Iterator[Slab[P]]:
        """Yield slabs of consecutive keys, each within the current limit of `at_once`."""
        at_once = at_once or KeysAtOnce(SLAB_KEYS)
        first, last = 0, len(self._bounds) - 1
        is_large = np.append(np.flatnonzero(np.diff(self._bounds) > self._rows_each), last)
        while first < last:
            large = int(is_large[np.searchsorted(is_large, first)])
            full = int(np.searchsorted(self._bounds, self._bounds[first] + self._slab_rows, side="right")) - 1
            end = max(first + 1, min(large, full, first + min(SLAB_KEYS, at_once.count)))
            yield Slab(self, first, end)
            first = end

    def pieces_of(self, first: int, end: int) -> Iterator[Iterator[P]]:
        """Yield the pieces of each key in [`first`, `end`)."""
        bounds = self._bounds[first : end + 1]
        if end == first + 1 and bounds[1] - bounds[0] > self._rows_each:
            yield self._stream(bounds[0], bounds[1])
            return
        rows = take_rows(self._batches, self._order[bounds[0] : bounds[-1]])
        yield from self.cut(rows, bounds - bounds[0])

    def _stream(self, start: int, end: int) -> Iterator[P]:
        for at in range(start, end, self._rows_each):
            yield from self.convert(take_rows(self._batches, self._order[at : min(at + self._rows_each, end)]))


@dataclass(frozen=True)
class Slab(Generic[P]):
    """Consecutive keys whose rows are converted together; iteration yields an iterator of pieces per key."""

    rows: KeySlabs[P]
    first_key: int
    end_key: int

    @property
    def keys(self) -> int:
        return self.end_key - self.first_key

    def __iter__(self) -> Iterator[Iterator[P]]:
        return self.rows.pieces_of(self.first_key, self.end_key)
