"""Measures a peer's progress from the results of sampled keys that it prints as lines.

A result is the running count ``n`` and sum ``s`` of a key. The counts of all sampled keys add up to the number of
sampled rows processed so far, which gives the end of each micro-batch, whatever pieces a peer works in, and even if it
prints only the last of several results of a key.

A peer that works in pieces prints nothing for a while, and then a burst. Its rows were processed evenly since the end
of the previous burst, or since the peer was ready::

    rows │              ┌──  burst
         │          ····│
      R ─┼───── ·x······│      x: when R rows were processed
         │ ┌────·───────┘
         └─┴────────────────── time

The results of one piece may take longer to print than a burst lasts. So the time of a peer that processes all rows as
one piece includes start and warm-up.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from holdfast.errors import CorruptionError

# Flink's print connector: "2> +U[17, 3, 120]"; +I and +U add a result, -U and -D retract one.
_RESULT = re.compile(rb"\+[IU]\[(-?\d+), (-?\d+), (-?\d+)\]")
READY = b"ready\n"
_PAUSE_S, _BURST_S = 0.02, 0.1
_RETRACTED = re.compile(rb"-[UD]\[")


class _Burst:
    """Results that arrive without a pause."""

    def __init__(self, first_s: float) -> None:
        self._first_s = self.last_s = first_s
        self.rows = 0

    def holds(self, at_s: float) -> bool:
        return at_s - self.last_s <= _PAUSE_S and at_s - self._first_s <= _BURST_S

    def add(self, at_s: float, rows: int) -> None:
        """Note a result, which brings the processed rows to `rows`."""
        self.last_s, self.rows = at_s, rows


class Progress:
    """A peer's progress so far.

    `rows_so_far` is the cumulative number of rows of sampled keys by micro-batch. `ready_s` is when the program started
    to read; `latest` has count and sum of each sampled key.
    """

    def __init__(self, rows_so_far: Sequence[int]) -> None:
        self._rows_so_far = rows_so_far
        self._rows = 0
        self._bursts: list[_Burst] = []
        self.latest: dict[int, tuple[int, int]] = {}
        self.ready_s: float | None = None

    def take(self, line: bytes, at_s: float) -> bool:
        """Note a line that arrived at `at_s`; return whether it is a result or the sign that the peer is ready."""
        found = _RESULT.search(line)
        if found is None:
            if line == READY:
                self.ready_s = at_s
            return line == READY or bool(_RETRACTED.search(line))
        key, n, s = map(int, found.groups())
        self._rows += n - self.latest.get(key, (0, 0))[0]
        self.latest[key] = (n, s)
        if not self._bursts or not self._bursts[-1].holds(at_s):
            self._bursts.append(_Burst(at_s))
        self._bursts[-1].add(at_s, self._rows)
        return True

    def ends_s(self, *, in_pieces: bool = True) -> list[float]:
        """Return when each micro-batch's rows were processed, at even intervals unless the peer works in pieces."""
        assert self.ready_s is not None
        if not in_pieces:
            return np.linspace(self.ready_s, self._bursts[-1].last_s, len(self._rows_so_far) + 1)[1:].tolist()
        times = [self.ready_s, *(burst.last_s for burst in self._bursts)]
        rows = np.maximum.accumulate([0, *(burst.rows for burst in self._bursts)])
        found: list[float] = np.interp(self._rows_so_far, rows, times).tolist()
        return found

    def done(self, batches: int) -> bool:
        return batches == 0 or self._rows >= self._rows_so_far[batches - 1]

    def totals(self) -> pa.Table:
        """Return the last result of each sampled key, sorted by key."""
        keys = sorted(self.latest)
        columns = {"key": keys, "n": [self.latest[k][0] for k in keys], "s": [self.latest[k][1] for k in keys]}
        return pa.table(columns, pa.schema([(name, pa.int64()) for name in columns]))


def equality(what: str, found: pa.Table, expected: pa.Table) -> dict[str, object]:
    """Check that two tables are equal; return the entry for the results document. Raises `CorruptionError`."""
    if not found.equals(expected):
        wrong = set(map(tuple, _rows(found))) ^ set(map(tuple, _rows(expected)))
        raise CorruptionError(
            "an engine's counts and sums do not match the rows that it read, so its time does not count",
            what=what,
            rows=found.num_rows,
            expected=expected.num_rows,
            examples=sorted(wrong)[:4],
        )
    return {"what": what, "rows": expected.num_rows, "equal": True}


def _rows(table: pa.Table) -> list[list[int]]:
    return [list(row.values()) for row in table.to_pylist()]


Sums = Mapping[str, float]


class Usage:
    """Samples of growing sums by name."""

    def __init__(self, so_far: Callable[[], Sums], clock: Callable[[], float] = time.monotonic) -> None:
        self._so_far = so_far
        self._clock = clock
        self._samples: list[tuple[float, Sums]] = []

    def look(self) -> None:
        self._samples.append((self._clock(), self._so_far()))

    def between(self, start_s: float, end_s: float) -> dict[str, float]:
        """Return the growth of each sum between two times, interpolated between samples."""
        times = [at_s for at_s, _ in self._samples]
        grown = {}
        for name in dict.fromkeys(name for _, sums in self._samples for name in sums):
            values = [sums.get(name, 0.0) for _, sums in self._samples]
            grown[name] = round(float(np.interp(end_s, times, values) - np.interp(start_s, times, values)), 3)
        return grown
