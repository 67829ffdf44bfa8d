"""The last micro-batches of queries that run on this machine, as their state servers remember them.

A server is asked at most once in `SHOWN_MS`, however many look. Where none runs, as on a laptop beside a cluster, there
is nothing to show, and the page shows what is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast import clock
from holdfast.spark_integration.client.recent import OperatorBatch, RecentBatch, over_executors

SHOWN_MS = 1_000
BATCHES_MAX = 12
#: A server that hangs holds pages up for one part in so many of the time.
_REST = 10


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

    def of_operator(self, query_id: str, directory: str) -> list[OperatorBatch]:
        """Return the last micro-batches of an operator of a query, newest first."""
        wanted = (one for one in self.batches() if (one.query, one.operator) == (query_id, directory))
        return over_executors(wanted)[:BATCHES_MAX]

    def batches(self) -> list[RecentBatch]:
        """Return the last micro-batches of all queries, oldest first."""
        with self._lock:
            if (begun_ms := self._monotonic_ms()) >= self._due_ms:
                self._latest = self._read()
                now_ms = self._monotonic_ms()
                self._due_ms = now_ms + max(SHOWN_MS, _REST * (now_ms - begun_ms))
            return self._latest
