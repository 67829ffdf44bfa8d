"""What the state server does after commits, which no micro-batch should wait for.

It drops versions that the query has left behind, writes snapshots so that chains of commits stay short, merges
large runs, and removes what killed attempts left.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast import clock
from holdfast.backends.base import Backend, Pointer
from holdfast.errors import HoldfastError, NotFoundError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog, SnapshotPolicy, chain_of
from holdfast.snapshotter.storage import ObjectStorage, open_storage, parse_storage_options
from holdfast.spark_integration.open_shards import OpenShards
from holdfast.spark_integration.state_messages import Committed

LEFTOVER_AGE_MS = 10 * 60_000
LEFTOVER_EVERY_MS = 60_000
STORAGES_KEPT = 8

_log = logging.getLogger(__name__)


class Housekeeping:
    """The background work of an executor's shards, newest announcement of each shard first come.

    Parameters
    ----------
    shards : OpenShards
    io_executor : concurrent.futures.Executor
        Runs uploads.

    Notes
    -----
    Threads: `announce`, `drain` and `statistics` from any; `run` in one thread of its own.
    """

    def __init__(self, shards: OpenShards, io_executor: Executor) -> None:
        self._shards = shards
        self._io = io_executor
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, Committed] = OrderedDict()
        self._known: dict[str, Committed] = {}
        self._working = False
        self._ending = False
        self._swept_ms: dict[str, int] = {}
        self._storages: dict[tuple[str, tuple[tuple[str, str], ...]], ObjectStorage] = {}
        self.counters = {"announced": 0, "dropped": 0, "merged": 0, "snapshots": 0, "leftovers": 0, "errors": 0}

    def announce(self, message: Committed) -> None:
        """Take note of a commit; of several waiting for one shard, the newest is worked on."""
        with self._changed:
            self._waiting[message.shard.directory] = message
            self._known[message.shard.directory] = message
            self.counters["announced"] += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Let `run` return after the work that waits."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until no work waits; tell whether that came true in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._working, timeout_seconds)

    def run(self) -> None:
        """Work until `end`."""
        while True:
            with self._changed:
                self._working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return
                _, message = self._waiting.popitem(last=False)
                self._working = True
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
        log = self._commit_log(message)
        store = VersionedStore(backend, log)
        if message.accepted is not None:
            self.counters["dropped"] += len(store.prune(message.accepted))
            if log is not None:
                self._snapshot(backend, log, message.accepted, SnapshotPolicy(message.snapshot_max_commits))
        self.counters["merged"] += backend.maintain(message.committed)
        now_ms = clock.now_ms()
        if now_ms - self._swept_ms.get(message.shard.directory, 0) >= LEFTOVER_EVERY_MS:
            self._swept_ms[message.shard.directory] = now_ms
            self.counters["leftovers"] += backend.remove_leftovers((now_ms - LEFTOVER_AGE_MS) * 1_000_000)

    def _snapshot(self, backend: Backend, log: ObjectCommitLog, pointer: Pointer, policy: SnapshotPolicy) -> None:
        with backend.view(pointer) as view:
            if not policy.is_due(log.shorten(chain_of(view.properties))):
                return
        backend.verify()  # what is damaged must not become durable
        with backend.view(pointer) as view:
            entry = log.write_snapshot(pointer, view)
        self.counters["snapshots"] += 1
        _log.info("wrote snapshot %s of %d bytes", entry.key, entry.size_bytes)

    def _commit_log(self, message: Committed) -> ObjectCommitLog | None:
        if message.checkpoint_dir is None:
            return None
        key = (message.checkpoint_dir, tuple(sorted(message.storage_options.items())))
        if key not in self._storages:
            if len(self._storages) >= STORAGES_KEPT:  # such as those of credentials that were replaced
                self._storages.pop(next(iter(self._storages))).close()
            options = parse_storage_options(dict(message.storage_options))
            self._storages[key] = open_storage(message.checkpoint_dir, options)
        notes = Path(message.shard.directory) / "snapshots"
        return ObjectCommitLog(self._storages[key], message.prefix, message.shard.schemas(), self._io, notes)

    def statistics(self) -> dict[str, Any]:
        """Return counters, and by shard directory what the shard occupies, or why that cannot be said."""
        with self._changed:
            known = dict(self._known)
        shards: dict[str, Any] = {}
        for directory, message in known.items():
            if Path(directory).exists():
                try:
                    with self._shards.use(message.shard) as backend:
                        shards[directory] = asdict(backend.statistics())
                except HoldfastError as exc:
                    shards[directory] = {"error": str(exc)}
        return {"pid": os.getpid(), "counters": dict(self.counters), "shards": shards}
