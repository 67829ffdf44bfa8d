"""Aggregates overlapping windows by panes, so that Spark sends each row once, not once per window.

::

    windows of 10 s every 4 s   [───────────────────)
                                        [───────────────────)
                                                [───────────────────)
    panes of 2 s                │   │   │   │   │ ▒ │   │   │   │   │     ▒ is in all three windows

    rows ─▶ their panes ─▶ a state per pane ─▶ a state per window of the pane ═shuffle═▶ `Aggregation`

A pane's length is the greatest common divisor of length and slide, so that a window is a whole number of panes. To
Spark a pane is a window that overlaps no other. Windows are part of the key, which selects the shard, so panes are
expanded to windows before the shuffle, in Python, column by column.

Spark's ``xxhash64`` of key and window is derived from that of key and pane: the hash of the preceding columns is the
seed of the last column's hash. Each step of the hash is invertible, so the seed is computed from the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from holdfast.backends.arrow.rows import HashArray, IntArray
from holdfast.spark_integration.plan.arguments import after_1970

_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_P1_INVERSE, _P2_INVERSE, _P3_INVERSE = (pow(factor, -1, 1 << 64) for factor in (_P1, _P2, _P3))
_BYTES = 8


@dataclass(frozen=True)
class WindowPlaces:
    """The windows' length, slide and start, in microseconds."""

    length_us: int
    slide_us: int
    start_us: int

    @classmethod
    def of(cls, session: SparkSession, length: str, slide: str | None = None, start: str | None = None) -> WindowPlaces:
        """Return the places of the windows that Spark's `window` makes. Raises Spark's errors."""
        length_us = after_1970(session, F.window("t", length), "end")
        every = slide or length
        slide_us = length_us if slide is None else after_1970(session, F.window("t", slide), "end")
        start_us = 0 if start is None else after_1970(session, F.window("t", every, every, start), "start") % slide_us
        return cls(length_us, slide_us, start_us)

    @property
    def definition(self) -> str:
        """The definition that a restart must not change."""
        return f"length_us={self.length_us}, slide_us={self.slide_us}, start_us={self.start_us}"

    @property
    def overlap(self) -> bool:
        """Whether a row may be in several windows, so that a pane is smaller than a window."""
        return self.slide_us < self.length_us

    def pane(self, time: str | Column) -> Column:
        """Return the pane of a time: to Spark, a window that overlaps no other."""
        pane_us = math.gcd(self.length_us, self.slide_us)
        length = f"{pane_us} microseconds"
        return F.window(time, length, length, f"{self.start_us % pane_us} microseconds")

    def windows_of(self, pane_us: IntArray) -> tuple[IntArray, IntArray]:
        """Return the windows of panes, given the panes' starts: the index of each window's pane, and its start."""
        last = pane_us - (pane_us - self.start_us) % self.slide_us
        windows = -((pane_us - last - self.length_us) // self.slide_us)
        pane = np.repeat(np.arange(len(windows)), windows)
        earlier = np.arange(len(pane)) - (np.cumsum(windows) - windows)[pane]
        return pane, last[pane] - earlier * self.slide_us


def hashed(seeds: HashArray, values: IntArray) -> HashArray:
    """Return Spark's ``xxhash64`` of bigints or times; the seed is the hash of the preceding columns."""
    found = _rotated(seeds + np.uint64(_P5 + _BYTES) ^ _round(values), 27) * np.uint64(_P1) + np.uint64(_P4)
    found = (found ^ found >> np.uint64(33)) * np.uint64(_P2)
    found = (found ^ found >> np.uint64(29)) * np.uint64(_P3)
    return found ^ found >> np.uint64(32)


def seeds_of(hashes: HashArray, values: IntArray) -> HashArray:
    """Invert `hashed`: return the seeds that give these hashes for these values."""
    found = (hashes ^ hashes >> np.uint64(32)) * np.uint64(_P3_INVERSE)
    found = (found ^ found >> np.uint64(29) ^ found >> np.uint64(58)) * np.uint64(_P2_INVERSE)
    found = ((found ^ found >> np.uint64(33)) - np.uint64(_P4)) * np.uint64(_P1_INVERSE)
    return (_rotated(found, 64 - 27) ^ _round(values)) - np.uint64(_P5 + _BYTES)


def _round(values: IntArray) -> HashArray:
    return _rotated(values.view(np.uint64) * np.uint64(_P2), 31) * np.uint64(_P1)


def _rotated(numbers: HashArray, bits: int) -> HashArray:
    return numbers << np.uint64(bits) | numbers >> np.uint64(64 - bits)
