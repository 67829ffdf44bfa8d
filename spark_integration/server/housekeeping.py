"""What the state server does after commits, which no micro-batch should wait for.

It drops versions that the query no longer needs, merges large runs, removes leftovers of killed attempts, and drops
shards that are no longer used here (`holdfast.spark_integration.server.shard_use`). Snapshots have a thread of their
own: `holdfast.spark_integration.server.snapshotting`.

It also removes what an operator leaves in its local directory: the notes of former runs, and folders without shards.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast import clock
from holdfast.backends.base import Backend
from holdfast.backends.registry import find_backend
from holdfast.errors import HoldfastError, NotFoundError
from holdfast.mvcc import VersionedStore
from holdfast.spark_integration.client.messages import Committed
from holdfast.spark_integration.executor.local_dirs import CLAIM_SUFFIX, RUNS, SHARD_PREFIX
from holdfast.spark_integration.server.durable_logs import DurableLogs
from holdfast.spark_integration.server.open_shards import OpenShards
from holdfast.spark_integration.server.shard_queue import ShardQueue
from holdfast.spark_integration.server.shard_use import ShardUse

#: The current run, and one that may still be ending.
RUNS_KEPT = 2
#: How long leftovers of ended processes, and files that were set aside, can be inspected. Nothing of it is in use.
LEFTOVER_KEPT_MS = 10 * 60_000
LEFTOVER_EVERY_MS = 60_000
_log = logging.getLogger(__name__)


def remove_if_empty(operator_directory: Path) -> None:
    """Remove the directory of an operator that has no shards left here; if its query has none, the query's too.

    A query notes its runs under the operator's name even if the operator's shards are in another directory; see
    `holdfast.spark_integration.shard_call.claiming`.
    """
    query = operator_directory.parent
    if not any(query.glob(f"*/{SHARD_PREFIX}*")):
        going = [*query.glob("*"), query]
    elif not any(operator_directory.glob(f"{SHARD_PREFIX}*")):
        going = [operator_directory]
    else:
        return
    for folder in going:
        shutil.rmtree(folder / RUNS, ignore_errors=True)
        with suppress(OSError):  # something else is there
            folder.rmdir()


def remove_old_runs(query_directory: Path) -> None:
    """Remove the notes of all but the newest runs of a query."""
    for runs in query_directory.glob(f"*/{RUNS}"):
        _remove_old_notes(runs)


def _remove_old_notes(runs: Path) -> None:
    modified: dict[str, float] = {}
    notes = list(runs.glob("*"))
    for note in notes:
        with suppress(OSError):
            run = note.name.removesuffix(CLAIM_SUFFIX)
            modified[run] = max(note.stat().st_mtime, modified.get(run, 0))
    old = set(sorted(modified, key=modified.__getitem__)[:-RUNS_KEPT])
    for note in notes:
        if note.name.removesuffix(CLAIM_SUFFIX) in old:
            with suppress(OSError):
                note.unlink()


class Housekeeping:
    """The background work of an executor's shards.

    `forget`: called with the directory of each dropped shard, once its state is removed.

    Threads: `run` in one of its own, everything else from any.
    """

    def __init__(
        self,
        shards: OpenShards,
        logs: DurableLogs,
        use: ShardUse,
        forget: Callable[[str], None],
        now_ms: Callable[[], int] = clock.now_ms,
    ) -> None:
        self._shards = shards
        self._logs = logs
        self._use = use
        self._forget_elsewhere = forget
        self._now_ms = now_ms
        self.queue = ShardQueue()
        self._known: dict[str, Committed] = {}
        self._swept_ms: dict[str, int] = {}
        self.counters = {"announced": 0, "dropped": 0, "merged": 0, "leftovers": 0, "let_go": 0, "errors": 0}

    def announce(self, message: Committed) -> None:
        """Queue the work that follows a commit; of several commits of one shard only the newest is handled."""
        self._known[message.shard.directory] = message
        self.counters["announced"] += 1
        self.queue.put(message)

    def run(self) -> None:
        self.queue.work(self._handle)

    def _handle(self, message: Committed) -> None:
        try:
            with self._shards.use_announced(message) as backend:
                if message.state_dir is not None:
                    in_memory = find_backend(message.shard.backend).in_memory
                    self._use.called(message.shard.directory, in_memory=in_memory)
                self._keep(message, backend)
            self._let_go(self._use.idle_beside(message.shard.directory))
        except NotFoundError as exc:
            # The version was dropped, or the query removed or restarted: a later announcement has caught up.
            _log.info("nothing to do for %r: %s", message, exc)
        except HoldfastError:
            self.counters["errors"] += 1
            _log.exception("housekeeping failed for %r; will retry after the next commit", message)

    def _keep(self, message: Committed, backend: Backend) -> None:
        if message.accepted is not None:
            self.counters["dropped"] += len(VersionedStore(backend).prune(message.accepted))
        self.counters["merged"] += backend.maintain(message.committed)
        now_ms = self._now_ms()
        if abs(now_ms - self._swept_ms.get(message.shard.directory, 0)) >= LEFTOVER_EVERY_MS:  # a clock may go back
            self._swept_ms[message.shard.directory] = now_ms
            before_ns = (now_ms - LEFTOVER_KEPT_MS) * 1_000_000
            self.counters["leftovers"] += backend.remove_leftovers(before_ns)
            with self._logs.log_of(message) as log:
                if log is not None:
                    self.counters["leftovers"] += log.snapshots.remove_leftovers(before_ns)

    def tidy_up(self) -> None:
        """Drop unused shards, forget those that are gone, and close unneeded storages; called now and then."""
        self._use.take_up(self._shards.root)
        self._let_go(self._use.idle())
        for directory in list(self._known):
            if not os.path.exists(directory):  # `Path.exists` fails where the disk does, which would end the server
                self._forget(directory)
        for query in {Path(directory).parent.parent for directory in list(self._known)}:  # announcements come meanwhile
            with suppress(OSError):  # notes that cannot be listed stay
                remove_old_runs(query)
        self._shards.close_unused()
        self._logs.close_unused(list(self._known.values()))

    def _let_go(self, directories: Iterable[str]) -> None:
        """Remove the local state of shards, except those in use at this moment."""
        for directory in directories:
            try:
                if self._shards.remove(Path(directory)):
                    self.counters["let_go"] += 1
                    self._forget(directory)
                    remove_if_empty(Path(directory).parent)
                    _log.info("dropped %s, which is no longer used here", directory)
            except (HoldfastError, OSError) as exc:  # one that cannot go, as on a damaged disk, holds up no other
                self.counters["errors"] += 1
                _log.warning("%s is no longer used here, but could not be removed: %s", directory, exc)

    def _forget(self, directory: str) -> None:
        self.queue.forget(directory)
        self._known.pop(directory, None)
        self._swept_ms.pop(directory, None)
        self._use.forget(directory)
        self._forget_elsewhere(directory)

    def statistics(self) -> dict[str, Any]:
        """Return counters, and each shard directory's statistics, or the reason for having none."""
        shards: dict[str, Any] = {}
        for directory, message in list(self._known.items()):
            if os.path.exists(directory):
                try:
                    with self._shards.use_announced(message) as backend:
                        shards[directory] = asdict(backend.statistics())
                except HoldfastError as exc:
                    shards[directory] = {"error": str(exc)}
        return {"pid": os.getpid(), "counters": dict(self.counters), "shards": shards}
