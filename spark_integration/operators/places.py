"""Encodes a key and a time as one number, which sorts and searches several times faster than the pair."""

from __future__ import annotations

from typing import Literal

import numpy as np

from holdfast.backends.arrow.rows import IntArray

#: Upper limit of the numbers: leaves callers one of 63 bits for a flag.
_MOST = 1 << 62


class Places:
    """Numbers that ascend by key, then by time; keys are numbered from 0.

    ::

        key 0: 09:00 … 09:59, later │ key 1: 09:00 … 09:59, later │ …
    """

    def __init__(self, times: IntArray, keys: int) -> None:
        self._first, self._last = (int(times.min()), int(times.max())) if len(times) else (0, 0)
        self._ranks = self._last - self._first + 1
        self._known: IntArray | None = None
        if keys * (self._ranks + 1) > _MOST:
            # Rank only the times that occur, not the whole range.
            self._known = np.unique(times)
            self._ranks = len(self._known)

    def of(self, key: IntArray, at: IntArray, side: Literal["left", "right"] = "left") -> IntArray:
        """Return the place of each key and time; `right` is after all equal times, as in ``np.searchsorted``.

        A time that was not given has the place before the next given time.
        """
        if self._known is not None:
            return key * (self._ranks + 1) + np.searchsorted(self._known, at, side)
        is_behind = at > self._last if side == "left" else at >= self._first
        place: IntArray = key * (self._ranks + 1) + (np.clip(at, self._first, self._last) - self._first) + is_behind
        return place

    def times(self, key: IntArray, places: IntArray) -> IntArray:
        rank = places - key * (self._ranks + 1)
        return rank + self._first if self._known is None else self._known[rank]
