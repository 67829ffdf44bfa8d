"""What the state server does after commits, which no micro-batch should wait for.

It drops versions that the query has left behind, merges large runs, and removes what killed attempts left. Snapshots
have a thread of their own: `holdfast.spark_integration.snapshotting`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast import clock
from holdfast.backends.base import Backend
from holdfast.errors import HoldfastError, NotFoundError
from holdfast.mvcc import VersionedStore
from holdfast.spark_integration.durable_logs import DurableLogs
from holdfast.spark_integration.open_shards import OpenShards
from holdfast.spark_integration.shard_queue import ShardQueue
from holdfast.spark_integration.state_messages import Committed

LEFTOVER_AGE_MS = 10 * 60_000
LEFTOVER_EVERY_MS = 60_000

_log = logging.getLogger(__name__)


class Housekeeping:
    """The background work of an executor's shards.

    Parameters
    ----------
    shards : OpenShards
    logs : DurableLogs

    Notes
    -----
    Threads: `run` in one of its own, everything else from any.
    """

    def __init__(self, shards: OpenShards, logs: DurableLogs) -> None:
        self._shards = shards
        self._logs = logs
        self.queue = ShardQueue()
        self._known: dict[str, Committed] = {}
        self._swept_ms: dict[str, int] = {}
        self.counters = {"announced": 0, "dropped": 0, "merged": 0, "leftovers": 0, "errors": 0}

    def announce(self, message: Committed) -> None:
        """Take note of a commit; of several waiting for one shard, the newest is worked on."""
        self._known[message.shard.directory] = message
        self.counters["announced"] += 1
        self.queue.put(message)

    def run(self) -> None:
        """Work until the queue's end."""
        self.queue.work(self._handle)

    def _handle(self, message: Committed) -> None:
        try:
            with self._shards.use(message.shard) as backend:
                self._keep(message, backend)
        except NotFoundError as exc:
            # The version was dropped, or the query removed: a later announcement has caught up.
            _log.info("nothing to do for %r: %s", message, exc)
        except HoldfastError:
            self.counters["errors"] += 1
            _log.exception("housekeeping failed for %r; it is tried again after the next commit", message)

    def _keep(self, message: Committed, backend: Backend) -> None:
        if message.accepted is not None:
            self.counters["dropped"] += len(VersionedStore(backend).prune(message.accepted))
        self.counters["merged"] += backend.maintain(message.committed)
        now_ms = clock.now_ms()
        if now_ms - self._swept_ms.get(message.shard.directory, 0) >= LEFTOVER_EVERY_MS:
            self._swept_ms[message.shard.directory] = now_ms
            before_ns = (now_ms - LEFTOVER_AGE_MS) * 1_000_000
            self.counters["leftovers"] += backend.remove_leftovers(before_ns)
            log = self._logs.log_of(message)
            if log is not None:
                self.counters["leftovers"] += log.snapshots.remove_leftovers(before_ns)

    def statistics(self) -> dict[str, Any]:
        """Return counters, and by shard directory what the shard occupies, or why that cannot be said."""
        shards: dict[str, Any] = {}
        for directory, message in list(self._known.items()):
            if Path(directory).exists():
                try:
                    with self._shards.use(message.shard) as backend:
                        shards[directory] = asdict(backend.statistics())
                except HoldfastError as exc:
                    shards[directory] = {"error": str(exc)}
        return {"pid": os.getpid(), "counters": dict(self.counters), "shards": shards}
