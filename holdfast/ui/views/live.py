"""The last micro-batches of queries that run on this machine, as their state servers remember them.

A server is asked at most once in `SHOWN_MS`, however many look. Where none runs, as on a laptop beside a cluster, there
is nothing to show, and the page shows what is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast import clock
from holdfast.spark_integration.client.recent import RecentBatch

SHOWN_MS = 1_000
BATCHES_MAX = 12
#: The largest of all shards counts, not their sum.
_LAGS = ("snapshot_lag_versions", "snapshot_lag_ms")


@dataclass(frozen=True)
class LiveBatch:
    """One micro-batch of an operator, over all executors of this machine.

    Attributes
    ----------
    batch_id : int or None
    batch_ms : int
        When it was planned.
    shards : int
        That were called.
    values : dict of str to int
        By the names of `holdfast.spark_integration.client.measures.CallMeasures`.
    """

    batch_id: int | None
    batch_ms: int
    shards: int
    values: dict[str, int]

    def ms(self, name: str) -> float:
        """Return a time by its name without the unit, in ms."""
        return self.values.get(f"{name}_us", 0) / 1_000


class Live:
    """The last micro-batches, asked for now and then.

    Parameters
    ----------
    read : callable
        Asks the state servers.
    monotonic_ms : callable
        The time.

    Notes
    -----
    Threads: any.
    """

    def __init__(
        self, read: Callable[[], list[RecentBatch]], monotonic_ms: Callable[[], int] = clock.monotonic_ms
    ) -> None:
        self._read, self._monotonic_ms = read, monotonic_ms
        self._lock = threading.Lock()
        self._latest: list[RecentBatch] = []
        self._due_ms = 0

    def of_operator(self, query_id: str, directory: str) -> list[LiveBatch]:
        """Return the last micro-batches of an operator of a query, newest first."""
        with self._lock:
            if self._monotonic_ms() >= self._due_ms:
                self._latest = self._read()
                self._due_ms = self._monotonic_ms() + SHOWN_MS
            found = self._latest
        return merged(one for one in found if (one.query, one.operator) == (query_id, directory))


def merged(batches: Iterable[RecentBatch]) -> list[LiveBatch]:
    """Return the micro-batches of one operator over all executors, newest first."""
    found: dict[tuple[int, int | None], LiveBatch] = {}
    for one in batches:
        place = (one.batch_ms, one.batch_id)
        so_far = found.get(place, LiveBatch(one.batch_id, one.batch_ms, 0, {}))
        values = dict(so_far.values)
        for name, value in one.values.items():
            values[name] = max(values.get(name, 0), value) if name in _LAGS else values.get(name, 0) + value
        found[place] = LiveBatch(one.batch_id, one.batch_ms, so_far.shards + one.shards, values)
    newest = sorted(found.values(), key=lambda one: (one.batch_ms, one.batch_id or 0), reverse=True)
    return newest[:BATCHES_MAX]
