"""Snapshots in the background, and what they make superfluous: uploads that no micro-batch waits for.

A shard whose snapshot fails is tried again after a later commit, after a while that doubles with each failure. Commits
go on meanwhile, and their chain grows; a worker that finds it too long asks for a snapshot and waits (`write_now`).
After every few snapshots of a shard, what no version needs that the query may return to is deleted.

What is snapshotted is the newest version, although Spark may still drop it: for RocksDB that is much cheaper than the
one before, which has to be made again from what was written since. The snapshot of a version that is dropped is in no
later lineage, and deleted like all that such attempts leave.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import dataclass

from holdfast import clock
from holdfast.errors import HoldfastError, NotFoundError
from holdfast.snapshotter.catalogue import Headers
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import Lineage
from holdfast.snapshotter.retention import run_retention
from holdfast.spark_integration.durable_logs import DurableLogs
from holdfast.spark_integration.open_shards import OpenShards
from holdfast.spark_integration.shard_queue import ShardQueue
from holdfast.spark_integration.state_messages import Committed

RETRY_AFTER_MS, RETRY_AFTER_MS_MAX = 1_000, 5 * 60_000
#: A clean-up lists all objects of the shard.
CLEAN_UP_EVERY_SNAPSHOTS = 4

_log = logging.getLogger(__name__)


@dataclass
class _Progress:
    """What is known of one shard's snapshots in this process."""

    seen_ms: int
    failures: int = 0
    retry_ms: int = 0
    error: str | None = None
    snapshots: int = 0
    headers: Headers | None = None


class Snapshotting:
    """Writes the snapshots of an executor's shards, one after the other.

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
        self._progress: dict[str, _Progress] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.counters = {"snapshots": 0, "snapshot_bytes": 0, "snapshot_new_bytes": 0, "snapshot_errors": 0}
        self.counters |= {"clean_ups": 0, "deleted_objects": 0, "clean_up_errors": 0}

    def announce(self, message: Committed) -> None:
        """Consider a snapshot of the version that was committed."""
        if message.checkpoint_dir is not None:
            self.queue.put(message)

    def run(self) -> None:
        """Work until the queue's end."""
        self.queue.work(self._consider)

    def _consider(self, message: Committed) -> None:
        progress = self._progress_of(message)
        if clock.monotonic_ms() < progress.retry_ms:
            return
        try:
            self._write(message, forced=False)
        except NotFoundError as exc:
            # The version was dropped, or the query removed: a later announcement has caught up.
            _log.info("no snapshot for %r: %s", message, exc)
        except HoldfastError as exc:
            self.counters["snapshot_errors"] += 1
            progress.failures += 1
            progress.error = str(exc)
            pause_ms = min(RETRY_AFTER_MS << (progress.failures - 1), RETRY_AFTER_MS_MAX)
            progress.retry_ms = clock.monotonic_ms() + pause_ms
            _log.exception("no snapshot for %r; it is tried again in %d ms at the earliest", message, pause_ms)

    def write_now(self, message: Committed) -> bool:
        """Write a snapshot of the announced version in the calling thread; tell whether one was written.

        Raises
        ------
        HoldfastError
            It could not be written.
        """
        return self._write(message, forced=True)

    def _write(self, message: Committed, *, forced: bool) -> bool:
        log, pointer = self._logs.log_of(message), message.committed
        if log is None:
            return False
        progress = self._progress_of(message)
        with self._locks[message.shard.directory], self._shards.use(message.shard) as backend:
            with backend.view(pointer) as view:
                lineage = log.snapshots.notes.apply_to(Lineage.of(view.properties))
            age_seconds = (clock.monotonic_ms() - progress.seen_ms) / 1000
            if not (message.policy.is_overdue(lineage) if forced else message.policy.is_due(lineage, age_seconds)):
                return False
            started_ms = clock.monotonic_ms()
            entry, manifest = log.write_snapshot(backend, pointer)
        self._take_note(progress)
        self.counters["snapshots"] += 1
        self.counters["snapshot_bytes"] += manifest.stored_bytes + entry.size_bytes
        self.counters["snapshot_new_bytes"] += manifest.new_bytes + entry.size_bytes
        _log.info(
            "wrote snapshot %s/%s: %d files, %d bytes, %d of them new, in %d ms",
            *(message.prefix, entry.key, len(manifest.files), manifest.stored_bytes, manifest.new_bytes),
            clock.monotonic_ms() - started_ms,
        )
        if progress.snapshots % CLEAN_UP_EVERY_SNAPSHOTS == 0:
            self._clean_up(message, log, progress)
        return True

    @staticmethod
    def _take_note(progress: _Progress) -> None:
        progress.seen_ms, progress.failures, progress.retry_ms, progress.error = clock.monotonic_ms(), 0, 0, None
        progress.snapshots += 1

    def _clean_up(self, message: Committed, log: ObjectCommitLog, progress: _Progress) -> None:
        if message.accepted is None:
            return
        progress.headers = progress.headers or Headers(log.storage, message.prefix)
        try:
            with self._shards.use(message.shard) as backend, backend.view(message.accepted) as view:
                chain = Lineage.of(view.properties).chain
        except NotFoundError:  # the query has gone on meanwhile
            return
        try:
            done = run_retention(
                log.storage,
                message.prefix,
                message.accepted,
                chain,
                retained=message.retained_versions,
                headers=progress.headers,
            )
        except HoldfastError:
            self.counters["clean_up_errors"] += 1
            _log.exception("clean-up of %s failed; it is tried again after some more snapshots", message.prefix)
            return
        self.counters["clean_ups"] += 1
        self.counters["deleted_objects"] += len(done.delete)
        _log.info("deleted %d objects of %s, %d bytes", len(done.delete), message.prefix, done.delete_bytes)

    def _progress_of(self, message: Committed) -> _Progress:
        return self._progress.setdefault(message.shard.directory, _Progress(clock.monotonic_ms()))

    def errors(self) -> dict[str, str]:
        """Return by shard directory why its last snapshot failed; those that went well are not there."""
        return {directory: p.error for directory, p in list(self._progress.items()) if p.error is not None}
