"""What a transaction read and wrote, and how long it took.

Whether a written row is new is known of rows that the transaction has looked up before, as most functions do: nothing
is read only to be counted. What was written unread, such as an element of a list, is counted as written, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from holdfast import clock
from holdfast.backends.arrow.rows import BoolArray, IntArray
from holdfast.backends.run import Keys, Run


@dataclass(frozen=True)
class Changes:
    """Rows of one table that a transaction has changed."""

    #: Written with a value, and written as deleted
    put: int = 0
    deleted: int = 0
    #: Those of them that were looked up, and were absent or there
    new: int = 0
    removed: int = 0

    def __add__(self, other: Changes) -> Changes:
        return Changes(
            self.put + other.put,
            self.deleted + other.deleted,
            self.new + other.new,
            self.removed + other.removed,
        )


@dataclass
class Measures:
    """What one transaction has done."""

    look_up_ns: int = 0  #: Time in look-ups and scans
    moved_bytes: int = 0  #: Of the rows that look-ups and scans have returned, and of those that were written
    commit_ns: int = 0  #: Time to make the new version, here and in durable storage
    commit_bytes: int = 0  #: Of the commit, as it is stored; 0 without a commit log
    stored_bytes: int = 0  #: The same if the commit became an object of its own, else 0: the query's pointer carries it
    changes: dict[str, Changes] = field(default_factory=dict)  #: By table; known once it has committed
    monotonic_ns: Callable[[], int] = clock.monotonic_ns
    _looked_up: dict[str, list[tuple[Keys, BoolArray]]] = field(default_factory=dict)

    @contextmanager
    def looking_up(self) -> Iterator[None]:
        """Add the time of the context to the look-ups."""
        started_ns = self.monotonic_ns()
        try:
            yield
        finally:
            self.look_up_ns += self.monotonic_ns() - started_ns

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Add the time of the context to the commit."""
        started_ns = self.monotonic_ns()
        try:
            yield
        finally:
            self.commit_ns += self.monotonic_ns() - started_ns

    def scanned(self, runs: Iterator[Run]) -> Iterator[Run]:
        """Yield the runs of a scan, and count the time that they take."""
        while True:
            with self.looking_up():
                run = next(runs, None)
            if run is None:
                return
            self.moved_bytes += run.size_bytes
            yield run

    def looked_up(self, table: str, keys: Keys, exists: BoolArray) -> None:
        """Note what a look-up found, apart from the transaction's own writes."""
        self._looked_up.setdefault(table, []).append((keys, exists))

    def written(self, runs: Mapping[str, Run], *, is_first: bool) -> None:
        """Note the committed rows. `runs`: by table; `is_first`: there was no version before, so all rows are new."""
        for table, run in runs.items():
            deleted = int(np.count_nonzero(run.deleted))
            new, removed = (len(run) - deleted, 0) if is_first else self._known(run, self._looked_up.get(table, []))
            self.changes[table] = Changes(len(run) - deleted, deleted, new, removed)
        self._looked_up.clear()

    @staticmethod
    def _known(run: Run, looked_up: list[tuple[Keys, BoolArray]]) -> tuple[int, int]:
        """Return how many rows of `run` were looked up and absent, and how many existed and are deleted."""
        was_absent, was_there = np.zeros(len(run), np.bool_), np.zeros(len(run), np.bool_)
        for keys, exists in looked_up:
            rows = _rows_of(run, keys)
            found = rows >= 0
            was_absent[rows[found & ~exists]] = True
            was_there[rows[found & exists]] = True
        deleted = run.deleted
        return int(np.count_nonzero(was_absent & ~deleted)), int(np.count_nonzero(was_there & deleted))


def _rows_of(run: Run, keys: Keys) -> IntArray:
    """Return the row of each key, or a negative number; skips the search if the same keys were written."""
    if len(keys) == len(run) and np.array_equal(keys.hashes, run.hashes) and (run.hashes[1:] > run.hashes[:-1]).all():
        return np.arange(len(run))
    return run.find(keys)
