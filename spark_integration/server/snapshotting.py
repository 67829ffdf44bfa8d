"""Background snapshots and clean-ups, for which no micro-batch waits.

A failed snapshot is retried at a later commit, with exponential back-off. A worker whose commit chain is too long
requests a snapshot and waits for it (`write_now`). Each failure is counted, logged, and recorded in durable storage.

Before every few snapshots of a shard, a clean-up deletes the objects that no retained version needs. Each snapshot
records the number of snapshots since the last clean-up, so that short jobs clean up as often as long ones.

Snapshots are of the newest version, although Spark may still discard it. If it does, no later lineage contains the
snapshot, and a clean-up deletes it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from holdfast import clock
from holdfast.errors import CorruptionError, HoldfastError, NotFoundError, UnavailableError
from holdfast.snapshotter.commits import ObjectCommitLog
from holdfast.snapshotter.lineage import ChainEntry, Lineage
from holdfast.snapshotter.snapshots import CleanedUp
from holdfast.snapshotter.upkeep.catalogue import Headers
from holdfast.snapshotter.upkeep.retention import run_retention
from holdfast.snapshotter.upkeep.troubles import report_trouble
from holdfast.spark_integration.client.messages import Committed, SnapshotNews
from holdfast.spark_integration.server.open_shards import DurableLogs, OpenShards, ShardQueue

RETRY_AFTER_MS, RETRY_AFTER_MS_MAX = 1_000, 5 * 60_000
#: Not more often, because a clean-up lists all objects of the shard.
CLEAN_UP_EVERY_SNAPSHOTS = 4
#: How many consecutive versions, dropped before their snapshot, count as a failure.
MISSED_IS_FAILURE = 8
#: How long `write_now` waits for a running snapshot: less than the worker's 30 s, so that the worker gets the error.
BUSY_SECONDS = 25.0

_log = logging.getLogger(__name__)


@dataclass
class _Progress:
    """In-memory progress of a shard's snapshots; losing it costs only a little extra work."""

    seen_ms: int  #: When the shard was first seen or its last snapshot written
    #: Consecutive failures, by operation
    failures: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    missed: int = 0  #: Consecutive versions dropped before their snapshot
    has_searched: bool = False  #: Whether storage was searched for late snapshots by the shard's previous executor
    retry_ms: int = 0  #: Earliest time of the next attempt
    error: str | None = None  #: Why the last snapshot failed
    headers: Headers | None = None  #: Object headers that clean-ups have read
    unsent: SnapshotNews = field(default_factory=SnapshotNews)  #: News since the last answer to an announcement
    #: The micro-batch of the last announcement, and the answer to it
    answered: tuple[int | None, SnapshotNews] = field(default_factory=lambda: (None, SnapshotNews()))
    postponed: Committed | None = None  #: A commit postponed because a worker's snapshot was being written
    lock: threading.Lock = field(default_factory=threading.Lock)  #: Held while a snapshot is written


class Snapshotting:
    """Writes snapshots one by one; call `run` in its own thread, other methods from any thread."""

    def __init__(
        self,
        shards: OpenShards,
        logs: DurableLogs,
        monotonic_ms: Callable[[], int] = clock.monotonic_ms,
        now_ms: Callable[[], int] = clock.now_ms,
    ) -> None:
        self._shards = shards
        self._logs = logs
        self._monotonic_ms = monotonic_ms
        self._now_ms = now_ms
        self.queue = ShardQueue()
        self._progress: dict[str, _Progress] = {}
        self.counters = {"snapshots": 0, "snapshot_bytes": 0, "snapshot_new_bytes": 0, "snapshot_errors": 0}
        self.counters |= {"snapshots_missed": 0, "clean_ups": 0, "deleted_objects": 0, "clean_up_errors": 0}

    def announce(self, message: Committed) -> SnapshotNews:
        """Queue a version for a snapshot; return the outcome of earlier ones, the same to a repeated micro-batch."""
        if message.state_dir is None:
            return SnapshotNews()
        progress = self._progress_of(message)
        batch_ms = None if message.measured is None else message.measured.batch_ms
        answered_ms, answer = progress.answered
        news, progress.unsent = progress.unsent, SnapshotNews()
        progress.answered = batch_ms, answer + news if answered_ms == batch_ms else news
        self.queue.put(message)
        return replace(progress.answered[1], age_ms=max(0, self._monotonic_ms() - progress.seen_ms))

    def run(self) -> None:
        self.queue.work(self._consider)

    def forget(self, directory: str) -> None:
        """Forget a removed shard."""
        self.queue.forget(directory)
        self._progress.pop(directory, None)

    def _consider(self, message: Committed) -> None:
        progress = self._progress_of(message)
        if self._monotonic_ms() < progress.retry_ms:
            return
        try:
            self._write_unless_busy(message, progress)
        except NotFoundError as exc:
            # The version was dropped, or its query removed or restarted, before the snapshot began.
            self.counters["snapshots_missed"] += 1
            progress.missed += 1
            if progress.missed % MISSED_IS_FAILURE == 0:
                self._fail(message, progress, exc)
            else:
                _log.info("no snapshot for %r: %s", message, exc)
        except HoldfastError as exc:
            self._fail(message, progress, exc)

    def _write_unless_busy(self, message: Committed, progress: _Progress) -> None:
        """Write a due snapshot; if a worker is writing one, postpone it and serve other shards."""
        progress.postponed = message  # before trying the lock: `write_now` checks it after releasing the lock
        if not progress.lock.acquire(blocking=False):
            return
        try:
            progress.postponed = None
            self._write(message, progress, forced=False)
        finally:
            progress.lock.release()

    def write_now(self, message: Committed) -> bool:
        """Write a snapshot of the announced version in the calling thread; return whether one was written."""
        progress = self._progress_of(message)
        try:
            with _held(progress.lock, message):
                return self._write(message, progress, forced=True)
        finally:
            postponed = progress.postponed
            if postponed is not None and self._progress.get(message.shard.directory) is progress:  # not yet forgotten
                self.queue.put_back(postponed)

    def _write(self, message: Committed, progress: _Progress, *, forced: bool) -> bool:
        """Write a snapshot if due; the caller holds the shard's lock, but the shard may be reopened meanwhile."""
        pointer = message.committed
        with self._logs.log_of(message) as log, ExitStack() as held:
            if log is None:
                return False
            with self._shards.use(message) as backend:
                written = Lineage.of(backend.properties(pointer))
            progress.missed = 0
            lineage = log.snapshots.notes.apply_to(written)
            if not self._is_wanted(message, log, lineage, progress, forced=forced):
                return False
            if not progress.has_searched:
                log.snapshots.discover(lineage)
                progress.has_searched, lineage = True, log.snapshots.notes.apply_to(written)
                if not self._is_wanted(message, log, lineage, progress, forced=forced):
                    return False
            started_ms = self._monotonic_ms()
            if not os.path.exists(message.shard.directory):  # opening would recreate it, untracked
                raise NotFoundError("the shard was dropped before its snapshot", directory=message.shard.directory)
            with self._shards.use(message) as backend:
                frozen = held.enter_context(log.snapshots.frozen(backend, pointer))
            cleaned = self._clean_up(message, log, progress, lineage, written)
            # A failed clean-up may have found parts missing.
            is_sure = not progress.failures["clean-up"]
            entry, manifest = log.snapshots.store(frozen, message.shard.backend, cleaned, is_sure=is_sure)
        progress.seen_ms, progress.retry_ms, progress.error = self._monotonic_ms(), 0, None
        progress.failures.pop("snapshot", None)
        progress.unsent += SnapshotNews(stored_bytes=manifest.new_bytes + entry.size_bytes)
        self.counters["snapshots"] += 1
        self.counters["snapshot_bytes"] += manifest.stored_bytes + entry.size_bytes
        self.counters["snapshot_new_bytes"] += manifest.new_bytes + entry.size_bytes
        _log.info(
            "wrote snapshot %s/%s: %d files, %d bytes, %d of them new, in %d ms",
            *(message.prefix, entry.key, len(manifest.files), manifest.stored_bytes, manifest.new_bytes),
            self._monotonic_ms() - started_ms,
        )
        return True

    def _is_wanted(
        self, message: Committed, log: ObjectCommitLog, lineage: Lineage, progress: _Progress, *, forced: bool
    ) -> bool:
        if forced:
            return message.policy.is_overdue(lineage)
        age_ms = log.snapshots.age_ms(lineage) if message.policy.interval_seconds is not None else None
        if age_ms is None:
            age_ms = self._monotonic_ms() - progress.seen_ms
        return message.policy.is_due(lineage, age_ms / 1000)

    def _fail(self, message: Committed, progress: _Progress, exc: HoldfastError) -> None:
        self.counters["snapshot_errors"] += 1
        progress.unsent += SnapshotNews(failures=1)
        progress.error = str(exc)
        in_a_row = self._report(message, progress, "snapshot", exc)
        pause_ms = min(RETRY_AFTER_MS << min(in_a_row - 1, 20), RETRY_AFTER_MS_MAX)
        progress.retry_ms = self._monotonic_ms() + pause_ms
        _log.warning("no snapshot for %r; will retry in %d ms at the earliest", message, pause_ms)

    def _report(self, message: Committed, progress: _Progress, what: str, exc: HoldfastError) -> int:
        """Log a failure and record it in durable storage; return the number of failures in a row."""
        progress.failures[what] += 1
        in_a_row = progress.failures[what]
        _log.warning(
            "%s of %s has failed, %d in a row: %s", what, message.prefix, in_a_row, exc, exc_info=in_a_row == 1
        )
        try:
            with self._logs.log_of(message) as log:
                if log is not None:
                    report_trouble(log.objects, what, exc, in_a_row, socket.gethostname(), self._now_ms())
        except HoldfastError as unrecorded:
            _log.warning("cannot record the failure in %s: %s", message.state_dir, unrecorded)
        return in_a_row

    def _clean_up(
        self, message: Committed, log: ObjectCommitLog, progress: _Progress, lineage: Lineage, written: Lineage
    ) -> CleanedUp:
        """Clean up if due; return the record of the last clean-up for the next snapshot."""
        try:
            before = log.snapshots.cleaned_at(lineage)
        except CorruptionError as exc:
            _log.warning("cleaning up %s: the record of its last clean-up cannot be read: %s", message.prefix, exc)
            before = CleanedUp(snapshots_since=CLEAN_UP_EVERY_SNAPSHOTS)
        below = None
        # Failed snapshots leave objects, too, even if none ever succeeds.
        has_failed = progress.failures["snapshot"] % CLEAN_UP_EVERY_SNAPSHOTS == 1
        if before.snapshots_since >= CLEAN_UP_EVERY_SNAPSHOTS or has_failed:
            below = self._retain(message, log, progress, written.chain)
        if below is None:
            return CleanedUp(before.below, before.snapshots_since + 1)
        return CleanedUp(max(before.below, below), 1)

    def _retain(
        self, message: Committed, log: ObjectCommitLog, progress: _Progress, chain: Iterable[ChainEntry]
    ) -> int | None:
        """Delete unneeded objects; return the version below which no objects remain, or None on failure."""
        if message.accepted is None:
            return None
        if progress.headers is None:
            progress.headers = Headers(log.objects)
        progress.headers.shard = log.objects  # the storage may have been reopened
        try:
            done = run_retention(
                *(log.objects, message.accepted, chain), retained=message.retained_versions, headers=progress.headers
            )
        except HoldfastError as exc:
            self.counters["clean_up_errors"] += 1
            self._report(message, progress, "clean-up", exc)
            return None
        progress.failures.pop("clean-up", None)
        self.counters["clean_ups"] += 1
        self.counters["deleted_objects"] += len(done.delete)
        _log.info("deleted %d objects of %s, %d bytes", len(done.delete), message.prefix, done.delete_bytes)
        return done.needed_from

    def _progress_of(self, message: Committed) -> _Progress:
        return self._progress.setdefault(message.shard.directory, _Progress(self._monotonic_ms()))

    def ages_ms(self) -> dict[str, int]:
        """Return the time since each shard's last snapshot or, without one, since it was first seen."""
        now_ms = self._monotonic_ms()
        return {directory: max(0, now_ms - p.seen_ms) for directory, p in list(self._progress.items())}

    def errors(self) -> dict[str, str]:
        """Return the errors of shards whose last snapshot failed, by directory."""
        return {directory: p.error for directory, p in list(self._progress.items()) if p.error is not None}


@contextmanager
def _held(lock: threading.Lock, message: Committed) -> Iterator[None]:
    """Hold a shard's lock for the context; raise `UnavailableError` if a running snapshot holds it too long."""
    if not lock.acquire(timeout=BUSY_SECONDS):
        raise UnavailableError(
            f"another snapshot of this shard is still running after {BUSY_SECONDS:.0f} s: the storage is slow or hangs",
            shard=message.prefix,
        )
    try:
        yield
    finally:
        lock.release()
