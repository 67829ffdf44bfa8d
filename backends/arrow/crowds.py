"""Searches crowds: many rows of a run that share a hash, such as the rows of one key in a join.

::

    hash     key.user   key.at     key.number
    0x1f…    "ann"      09:00:01   …             key.at is the first column that differs among the rows. Since its
    0x1f…    "ann"      09:00:02   …             numbers ascend, a binary search finds the time of a wanted key, or a
    0x1f…    "ann"      09:00:05   …             range of times.

The order of rows that share a hash is undefined (FORMAT.md section 2). So a crowd is read once to check that its column
ascends, and the result is kept as long as the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import HashArray, IntArray, distinct, is_plain, numbers_of, rows_equal, to_bools

#: A hash with at most this many rows is no crowd.
CROWD_ROWS = 1024


def crowded(hashes: HashArray) -> HashArray:
    """Return the hashes of crowds, given the ascending hashes of all rows."""
    later = hashes[CROWD_ROWS:]
    return distinct(later[later == hashes[: len(later)]])


class Stretches(NamedTuple):
    """Stretches of consecutive rows, from `starts` up to `ends`."""

    starts: IntArray
    ends: IntArray

    @property
    def total(self) -> int:
        return int((self.ends - self.starts).sum())

    @property
    def rows(self) -> IntArray:
        counts = self.ends - self.starts
        found: IntArray = np.repeat(self.starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        return found


class Limits(NamedTuple):
    """Inclusive ranges of numbers in a key column."""

    column: int
    first: IntArray
    last: IntArray

    def within(self, numbers: IntArray, start: int) -> Stretches:
        """Return the rows in any of the ranges, each once, given their ascending `numbers` and the first row."""
        starts, ends = np.searchsorted(numbers, self.first), np.searchsorted(numbers, self.last, "right")
        order = np.argsort(starts)
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        starts[1:] = np.maximum(starts[1:], ends[:-1])
        return Stretches(start + starts, start + np.maximum(starts, ends))


class Crowds:
    """The searchable column of each crowd of a run and its slices, as far as known."""

    def __init__(self) -> None:
        self._columns: dict[tuple[int, int], int | None] = {}  # by address and number of the crowd's hashes

    def find(
        self,
        rows: tuple[HashArray, pa.RecordBatch],
        hashes: HashArray,
        limits: Callable[[int, slice], Limits | None] | None,
    ) -> Stretches:
        """Return the rows with one of the ascending `hashes`; for a crowd with limits, only those within them.

        `rows` are the run's hashes and keys. `limits` is given a crowd's searchable column and the slice of `hashes`
        that the crowd shares; it returns None if all rows of the crowd are wanted.
        """
        stored, keys = rows
        wanted = distinct(hashes)
        starts, ends = np.searchsorted(stored, wanted), np.searchsorted(stored, wanted, "right")
        parts, is_cut = [Stretches(starts, ends)], np.zeros(len(wanted), np.bool_)
        if limits is None:
            return parts[0]
        for i in np.flatnonzero(ends - starts > CROWD_ROWS).tolist():
            start, count = int(starts[i]), int(ends[i] - starts[i])
            crowd = keys.slice(start, count)
            place = stored.ctypes.data + start * stored.itemsize, count
            if place not in self._columns:
                self._columns[place] = column_in_order([crowd])
            column = self._columns[place]
            asked = slice(int(np.searchsorted(hashes, wanted[i])), int(np.searchsorted(hashes, wanted[i], "right")))
            near = None if column is None else limits(column, asked)
            numbers = None if near is None else numbers_of(crowd.column(near.column))
            if near is not None and numbers is not None:
                is_cut[i] = True
                parts.append(near.within(numbers, start))
        if not is_cut.any():
            return parts[0]
        parts[0] = Stretches(starts[~is_cut], ends[~is_cut])
        starts, ends = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
        order = np.argsort(starts, kind="stable")
        return Stretches(starts[order], ends[order])


def column_in_order(crowds: Sequence[pa.RecordBatch]) -> int | None:
    """Return the first column that differs among keys if it ascends without nulls in each crowd, else None."""
    for i, first in enumerate(crowds[0].columns):
        columns = [keys.select([i]) for keys in crowds]
        if not all(_has_only(column, first[0]) for column in columns):
            return i if all(_ascends(column.column(0)) for column in columns) else None
    return None


def _has_only(keys: pa.RecordBatch, value: pa.Scalar) -> bool:
    column, n = keys.column(0), len(keys)
    ends_so = value.equals(column[0]) and value.equals(column[-1])
    return ends_so and bool(rows_equal(keys.slice(1), keys.slice(0, n - 1)).all())


def _ascends(column: pa.Array) -> bool:
    if column.null_count or not is_plain(column.type):
        return False
    return bool(to_bools(pc.less_equal(column.slice(0, len(column) - 1), column.slice(1))).all())
