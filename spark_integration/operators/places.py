"""A key and a time as one number, which is sorted and searched several times faster than the two."""

from __future__ import annotations

from typing import Literal

import numpy as np

from holdfast.backends.arrow.rows import IntArray

#: Larger ones would not leave a bit of 63 for another mark.
_MOST = 1 << 62


class Places:
    """Numbers that ascend with the key and, for one key, with the time; keys are numbered from 0.

    ::

        key 0: 09:00 … 09:59, later │ key 1: 09:00 … 09:59, later │ …
    """

    def __init__(self, times: IntArray, keys: int) -> None:
        self._first, self._last = (int(times.min()), int(times.max())) if len(times) else (0, 0)
        self._ranks = self._last - self._first + 1
        self._known: IntArray | None = None
        if keys * (self._ranks + 1) > _MOST:
            # Not all times between: only those that there are.
            self._known = np.unique(times)
            self._ranks = len(self._known)

    def of(self, key: IntArray, at: IntArray, side: Literal["left", "right"] = "left") -> IntArray:
        """Return the place of each key and time; `right`: behind all of that time, as in ``np.searchsorted``.

        Of a time that is not one of those given, it is the place before the next.
        """
        if self._known is not None:
            return key * (self._ranks + 1) + np.searchsorted(self._known, at, side)
        is_behind = at > self._last if side == "left" else at >= self._first
        place: IntArray = key * (self._ranks + 1) + (np.clip(at, self._first, self._last) - self._first) + is_behind
        return place

    def times(self, key: IntArray, places: IntArray) -> IntArray:
        """Return the times at these places, given their keys."""
        rank = places - key * (self._ranks + 1)
        return rank + self._first if self._known is None else self._known[rank]
