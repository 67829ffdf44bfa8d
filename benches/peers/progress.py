"""How far a peer has come, from the results of sampled keys that it writes as lines.

A result is the running count ``n`` and sum ``s`` of a key. The counts of all sampled keys add up to the sampled rows
that are done, from which follows when each micro-batch's share of rows was done: that holds for every peer, in whatever
pieces it works, and also where it writes only the last of several results of a key.

A peer that works in pieces of its own writes nothing for a while, and then much at once: a burst. Its rows were done
since the end of the burst before it, or since the peer said that it was ready, evenly::

    rows │              ┌──  burst
         │          ····│
      R ─┼───── ·x······│      x: when R rows were done
         │ ┌────·───────┘
         └─┴────────────────── time

Results of one piece may take longer to print than a burst lasts. A peer that takes all rows as one piece is therefore
given the whole time from its start, warm-up included.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from holdfast.errors import CorruptionError

# Flink's print connector: "2> +U[17, 3, 120]"; -U takes a result back, +I and +U bring one.
_RESULT = re.compile(rb"\+[IU]\[(-?\d+), (-?\d+), (-?\d+)\]")
READY = b"ready\n"
_PAUSE_S, _BURST_S = 0.02, 0.1
_TAKEN_BACK = re.compile(rb"-[UD]\[")


class _Burst:
    """Results that arrive one after another."""

    def __init__(self, first_s: float) -> None:
        self._first_s = self.last_s = first_s
        self.rows = 0

    def holds(self, at_s: float) -> bool:
        """Tell whether a result of this time belongs to it."""
        return at_s - self.last_s <= _PAUSE_S and at_s - self._first_s <= _BURST_S

    def add(self, at_s: float, rows: int) -> None:
        """Note a result, after which so many rows are done in all."""
        self.last_s, self.rows = at_s, rows


class Progress:
    """What the lines of a peer have said so far.

    `rows_so_far` has by micro-batch the rows of sampled keys up to its end. `ready_s` is when the program said that it
    begins to read; `latest` has count and sum of each sampled key.
    """

    def __init__(self, rows_so_far: Sequence[int]) -> None:
        self._rows_so_far = rows_so_far
        self._rows = 0
        self._bursts: list[_Burst] = []
        self.latest: dict[int, tuple[int, int]] = {}
        self.ready_s: float | None = None

    def take(self, line: bytes, at_s: float) -> bool:
        """Note a line that arrived at `at_s`; tell whether it says how far the peer is."""
        found = _RESULT.search(line)
        if found is None:
            if line == READY:
                self.ready_s = at_s
            return line == READY or bool(_TAKEN_BACK.search(line))
        key, n, s = map(int, found.groups())
        self._rows += n - self.latest.get(key, (0, 0))[0]
        self.latest[key] = (n, s)
        if not self._bursts or not self._bursts[-1].holds(at_s):
            self._bursts.append(_Burst(at_s))
        self._bursts[-1].add(at_s, self._rows)
        return True

    def ends_s(self, *, in_pieces: bool = True) -> list[float]:
        """Return when each micro-batch's rows were done, evenly for a peer that takes all rows as one."""
        assert self.ready_s is not None
        if not in_pieces:
            return np.linspace(self.ready_s, self._bursts[-1].last_s, len(self._rows_so_far) + 1)[1:].tolist()
        times = [self.ready_s, *(burst.last_s for burst in self._bursts)]
        rows = np.maximum.accumulate([0, *(burst.rows for burst in self._bursts)])
        found: list[float] = np.interp(self._rows_so_far, rows, times).tolist()
        return found

    def done(self, batches: int) -> bool:
        """Tell whether the rows of so many micro-batches are done."""
        return batches == 0 or self._rows >= self._rows_so_far[batches - 1]

    def totals(self) -> pa.Table:
        """Return the last result of each sampled key, by key."""
        keys = sorted(self.latest)
        columns = {"key": keys, "n": [self.latest[k][0] for k in keys], "s": [self.latest[k][1] for k in keys]}
        return pa.table(columns, pa.schema([(name, pa.int64()) for name in columns]))


def equality(what: str, found: pa.Table, expected: pa.Table) -> dict[str, object]:
    """Return what was compared, as a document stores it; there is no figure for a wrong result."""
    if not found.equals(expected):
        wrong = set(map(tuple, _rows(found))) ^ set(map(tuple, _rows(expected)))
        raise CorruptionError(
            "an engine's counts and sums are not those of the rows that it read: its time says nothing",
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
    """Sums by name that grow, noted now and then."""

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
