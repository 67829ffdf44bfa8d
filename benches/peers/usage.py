"""What the processes of a run used between two moments that are known only afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

Sums = Mapping[str, float]


class Usage:
    """Sums that grow, noted now and then.

    Parameters
    ----------
    so_far : callable
        Returns the sums, by name.
    clock : callable
        Returns the seconds.
    """

    def __init__(self, so_far: Callable[[], Sums], clock: Callable[[], float] = time.monotonic) -> None:
        self._so_far = so_far
        self._clock = clock
        self._samples: list[tuple[float, Sums]] = []

    def look(self) -> None:
        """Note the sums as they are now."""
        self._samples.append((self._clock(), self._so_far()))

    def between(self, start_s: float, end_s: float) -> dict[str, float]:
        """Return by how much each sum has grown between two moments, as if evenly from one look to the next."""
        times = [at_s for at_s, _ in self._samples]
        grown = {}
        for name in dict.fromkeys(name for _, sums in self._samples for name in sums):
            values = [sums.get(name, 0.0) for _, sums in self._samples]
            grown[name] = round(float(np.interp(end_s, times, values) - np.interp(start_s, times, values)), 3)
        return grown
