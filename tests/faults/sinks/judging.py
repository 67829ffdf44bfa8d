"""What a reader of a sink's target must find after any kills: all rows, each once, of one attempt."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from tests.faults.sinks.killed_query import KEYS, ROWS

Numbers = TypeVar("Numbers", int, np.ndarray)
#: Rows of a micro-batch that a key has.
EACH = ROWS // KEYS


@dataclass(frozen=True)
class Census:
    """What is wrong with the rows of a target."""

    #: What was looked at.
    batches: int
    rows: int
    #: Pairs of key and micro-batch that are missing, and rows that are there more than once.
    lost: int
    doubled: int
    #: Rows with other totals than the numbers give, or of no micro-batch that there was.
    wrong: int
    #: Partitions of a micro-batch with rows of several attempts, and micro-batches of several starts of the query.
    mixed: int

    @property
    def is_right(self) -> bool:
        return not (self.lost or self.doubled or self.wrong or self.mixed)


def census(
    rows: pa.Table, batches: int, *, upserts: bool, keys_of: Callable[[int], Iterable[int]] = lambda _: range(KEYS)
) -> Census:
    """Count what is wrong with rows of `killed_query` after so many micro-batches."""
    wanted = {(key, batch) for batch in range(batches) for key in keys_of(batch)}
    if upserts:
        wanted = set(dict(sorted(wanted)).items())
    found = Counter(zip(rows["key"].to_pylist(), rows["batch"].to_pylist(), strict=True))
    right = _right(rows)
    return Census(
        batches=batches,
        rows=rows.num_rows,
        lost=len(wanted - found.keys()),
        doubled=sum(found.values()) - len(found),
        wrong=int(np.count_nonzero(~right)) + len(found.keys() - wanted),
        mixed=_several(rows, ["batch", "part"], "attempt") + _several(rows, ["batch"], "run"),
    )


class Onlooker:
    """Reads a table by key again and again, while its query is killed."""

    def __init__(self, read: Callable[[], pa.Table]) -> None:
        self._read, self._end = read, threading.Event()
        self._thread = threading.Thread(target=self._look)
        #: Reads that found rows, and those with rows of several micro-batches, each of which has all keys.
        self.reads = self.torn = 0
        self._seen: dict[tuple[int, int], set[str]] = defaultdict(set)

    @property
    def changed(self) -> int:
        return sum(len(attempts) > 1 for attempts in self._seen.values())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.05):
            with suppress(psycopg.OperationalError):  # its server is killed, too
                rows = self._read().to_pylist()
                self.reads += bool(rows)
                self.torn += len({row["batch"] for row in rows}) > 1
                for row in rows:
                    self._seen[row["key"], row["batch"]].add(row["attempt"])


def right_totals(key: Numbers, batch: Numbers) -> tuple[Numbers, Numbers]:
    """Return a key's count and sum after a micro-batch: its numbers are key, key + KEYS, … up to the end of that."""
    n = EACH * (batch + 1)
    return n, n * key + KEYS * (n * (n - 1) // 2)


def _right(rows: pa.Table) -> np.ndarray:
    """Tell for each row whether its totals are those of the numbers."""
    n, total = right_totals(rows["key"].to_numpy(), rows["batch"].to_numpy())
    right: np.ndarray = (rows["n"].to_numpy() == n) & (rows["total"].to_numpy() == total)
    return right


def _several(rows: pa.Table, by: list[str], column: str) -> int:
    counted = rows.group_by(by).aggregate([(column, "count_distinct")])
    return int(pc.sum(pc.greater(counted[f"{column}_count_distinct"], 1)).as_py() or 0)
