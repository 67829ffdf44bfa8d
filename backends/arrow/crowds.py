"""Crowds: many rows of a run that share a hash, as those of one key in a join, and how a few of them are found.

::

    hash     key.user   key.at     key.number
    0x1f…    "ann"      09:00:01   …             The first column that differs among the rows. If it is a number that
    0x1f…    "ann"      09:00:02   …             ascends, as a time is, it is searched: for the time of a wanted key,
    0x1f…    "ann"      09:00:05   …             or for a range of times.

No reader relies on the order of rows that share a hash (FORMAT.md section 2). So a crowd is read once to see if its
column ascends, and the answer is kept for as long as its run is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import HashArray, IntArray, distinct, numbers_of, rows_equal

#: Fewer rows of one hash are read as they are.
CROWD_ROWS = 1024


def crowded(hashes: HashArray) -> HashArray:
    """Return the hashes that more than `CROWD_ROWS` rows share, given those of all rows, ascending."""
    later = hashes[CROWD_ROWS:]
    return distinct(later[later == hashes[: len(later)]])


class Stretches(NamedTuple):
    """Rows that follow each other: where each stretch begins, and where it ends."""

    starts: IntArray
    ends: IntArray

    @property
    def total(self) -> int:
        """How many rows there are."""
        return int((self.ends - self.starts).sum())

    @property
    def rows(self) -> IntArray:
        """All rows, in order."""
        counts = self.ends - self.starts
        found: IntArray = np.repeat(self.starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        return found


class Limits(NamedTuple):
    """Ranges of numbers in a key column, both ends included."""

    column: int
    first: IntArray
    last: IntArray

    def within(self, numbers: IntArray, start: int) -> Stretches:
        """Return the rows with ascending numbers in one of the ranges, each row once; the first one's is `start`."""
        starts, ends = np.searchsorted(numbers, self.first), np.searchsorted(numbers, self.last, "right")
        order = np.argsort(starts)
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        starts[1:] = np.maximum(starts[1:], ends[:-1])
        return Stretches(start + starts, start + np.maximum(starts, ends))


class Crowds:
    """What has been learned of the crowds of a run and its slices: of each, which column can be searched."""

    def __init__(self) -> None:
        self._columns: dict[tuple[int, int], int | None] = {}  # by the place of its hashes in memory, and their number

    def find(
        self,
        rows: tuple[HashArray, pa.RecordBatch],
        hashes: HashArray,
        limits: Callable[[int, slice], Limits | None] | None,
    ) -> Stretches:
        """Return the rows with one of ascending `hashes`; of a crowd only those within limits, if there are any.

        Parameters
        ----------
        rows : tuple
            The run's hashes and keys.
        limits : callable
            Returns the limits for the hashes in a slice, which are one crowd's, given the column that can be searched;
            None if all rows of the crowd are wanted.
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
    """Return the first column that differs among keys; None unless its numbers ascend in each crowd, without a null."""
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
    numbers = None if column.null_count else numbers_of(column)
    return numbers is not None and bool((numbers[1:] >= numbers[:-1]).all())
