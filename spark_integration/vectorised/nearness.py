"""Which rows lie near others: of the same key, with times no further apart than so much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.backends.arrow.rows import IntArray

#: Pairs that are found at once: a row may have millions.
_AT_ONCE = 65_536


@dataclass(frozen=True)
class KeyedTimes:
    """Rows by key and time."""

    key: IntArray  #: Which of the call's keys each row has
    at: IntArray  #: In microseconds

    def __len__(self) -> int:
        return len(self.key)

    def take(self, rows: IntArray) -> KeyedTimes:
        """Return some of them, in their order."""
        return KeyedTimes(self.key[rows], self.at[rows])


class Near:
    """Rows that are asked which of them lie near others."""

    def __init__(self, rows: KeyedTimes, within_us: int) -> None:
        self._rows = rows
        self._times = np.unique(rows.at)
        self._within_us = within_us
        places = self._place(rows.key, np.searchsorted(self._times, rows.at))
        self._order = np.argsort(places, kind="stable")
        self._places = places[self._order]

    def _place(self, key: IntArray, rank: IntArray) -> IntArray:
        """Return a number that grows with the key and, of one key, with the rank of a time."""
        return key * (len(self._times) + 1) + rank

    def pairs(self, others: KeyedTimes) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield which of `others` lies near which row, so many pairs at once."""
        from_rank = np.searchsorted(self._times, others.at - self._within_us)
        to_rank = np.searchsorted(self._times, others.at + self._within_us, side="right")
        first = np.searchsorted(self._places, self._place(others.key, from_rank))
        end = np.searchsorted(self._places, self._place(others.key, to_rank))
        so_far = np.cumsum(end - first)
        total = int(so_far[-1]) if len(so_far) else 0
        for start in range(0, total, _AT_ONCE):
            pair = np.arange(start, min(start + _AT_ONCE, total))
            other = np.searchsorted(so_far, pair, side="right")
            yield other, self._order[end[other] - (so_far[other] - pair)]

    def latest(self, others: KeyedTimes) -> IntArray:
        """Return, for each of `others`, the latest near row at or before its time, or -1."""
        if not len(self._order):
            return np.full(len(others), -1)
        rank = np.searchsorted(self._times, others.at, side="right")
        found = self._order[np.searchsorted(self._places, self._place(others.key, rank)) - 1]
        row = self._rows.take(found)
        is_near = (row.key == others.key) & (row.at <= others.at) & (row.at >= others.at - self._within_us)
        return np.where(is_near, found, -1)
