"""Background work of the state server after commits.

It drops versions that the query no longer needs, merges large runs, and removes leftovers and shards that the executor
no longer uses.

**Which shards are in use** on this executor? Others have moved away or belong to ended queries. Spark does not notify
an executor when a shard moves. The only sign is that an operator's calls continue without the shard::

    operator's local calls   0 1 2 3 0 1 2 3 0 1 3 0 1 3 0 1 3 …        shard 2's last call
                                               └── a round ─┘           dropped after `IDLE_ROUNDS` rounds

A **round** is as many calls as the operator has local shards. A shard is dropped after `IDLE_ROUNDS` without a call,
and restored when it returns: at most N / `IDLE_ROUNDS` of N calls pay for a restore.

An operator without calls has ended, has moved away with all its shards, or is waiting for rows. Its shards in RAM are
dropped after `SILENT_MS`; shards on disk stay for a day, like a dead executor's.

Only durable state is dropped. A file in the shard's directory marks it as durable, also for later servers.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast import clock
from holdfast.backends.base import Backend
from holdfast.backends.local_files import DURABLE
from holdfast.backends.registry import find_backend
from holdfast.errors import HoldfastError, NotFoundError
from holdfast.mvcc import VersionedStore
from holdfast.spark_integration.client.messages import Committed
from holdfast.spark_integration.executor.local_dirs import CLAIM_SUFFIX, IN_MEMORY, ON_DISK, RUNS, SHARD_PREFIX
from holdfast.spark_integration.executor.takeover import KEPT_MS
from holdfast.spark_integration.server.open_shards import DurableLogs, OpenShards, ShardQueue

IDLE_ROUNDS = 32
SILENT_MS = 15 * 60_000
#: The current run and a previous run that may still be ending.
RUNS_KEPT = 2
#: How long unused files, left by ended processes or set aside as damaged, stay for inspection.
LEFTOVER_KEPT_MS = 10 * 60_000
LEFTOVER_EVERY_MS = 60_000
_log = logging.getLogger(__name__)


@dataclass
class _Operator:
    """An operator of a query on this executor."""

    kept_ms: int  #: How long its shards stay without calls
    called_ms: int = 0  #: Time of its last call
    calls: int = 0
    #: By shard directory, the value of `calls` at the shard's last call; least recent first
    shards: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def add(self, shards: Iterable[Path]) -> None:
        """Register shards whose last call is unknown, as if they were called now."""
        for path in shards:
            self.shards.setdefault(str(path), self.calls)

    def idle(self, now_ms: int) -> list[str]:
        if now_ms - self.called_ms > self.kept_ms:
            return list(self.shards)
        since = self.calls - IDLE_ROUNDS * len(self.shards)
        found = []
        for directory, calls in self.shards.items():
            if calls >= since:
                break
            found.append(directory)
        return found


class ShardUse:
    """Counts calls of durable shards and marks the shards as durable; thread-safe."""

    def __init__(self, now_ms: Callable[[], int] = clock.monotonic_ms) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._operators: dict[Path, _Operator] = {}

    def called(self, directory: str, *, in_memory: bool) -> None:
        """Count a micro-batch's call of a durable shard."""
        path = Path(directory)
        with suppress(OSError):  # an unmarked shard may stay too long
            if not (path / DURABLE).exists():
                (path / DURABLE).touch(mode=0o600)
        with self._lock:
            operator = self._operators.get(path.parent)
            if operator is None:
                operator = self._operators[path.parent] = _Operator(SILENT_MS if in_memory else KEPT_MS)
                operator.add(_of_kind(path.parent, _kind(path)))
            operator.calls += 1
            operator.called_ms = self._now_ms()
            operator.shards[directory] = operator.calls
            operator.shards.move_to_end(directory)

    def count_existing(self, executor_directory: Path) -> None:
        """Register durable shards left by earlier servers or failed calls, as if they were called now."""
        for place, kept_ms in ((IN_MEMORY, SILENT_MS), (ON_DISK, KEPT_MS)):
            marks = _found(executor_directory / place, f"*/*/{SHARD_PREFIX}*/{DURABLE}")
            for folder, kind in {(mark.parents[1], _kind(mark.parent)) for mark in marks}:
                shards = _of_kind(folder, kind)
                with self._lock:
                    self._operators.setdefault(folder, _Operator(kept_ms, self._now_ms())).add(shards)

    def idle(self) -> list[str]:
        """Return the directories of idle shards."""
        now_ms = self._now_ms()
        with self._lock:
            return [directory for operator in self._operators.values() for directory in operator.idle(now_ms)]

    def idle_siblings(self, directory: str) -> list[str]:
        """Return the idle shards of a shard's operator, in time proportional to their number."""
        with self._lock:
            operator = self._operators.get(Path(directory).parent)
            return [] if operator is None else operator.idle(self._now_ms())

    def forget(self, directory: str) -> None:
        """Forget a removed shard."""
        path = Path(directory)
        with self._lock:
            operator = self._operators.get(path.parent)
            if operator is not None:
                operator.shards.pop(directory, None)
                if not operator.shards:
                    del self._operators[path.parent]


def _kind(shard: Path) -> str:
    """Return the digest in a shard's name; shards with the same digest are all durable or all not."""
    return shard.name.rpartition("-")[2]


def _of_kind(operator_directory: Path, kind: str) -> list[Path]:
    return _found(operator_directory, f"{SHARD_PREFIX}*-{kind}")


def _found(folder: Path, pattern: str) -> list[Path]:
    """Return the matches below a folder; unlike `Path.glob`, skip unreadable and vanished entries."""
    return [folder / name for name in glob.glob(pattern, root_dir=folder)]


def remove_if_empty(operator_directory: Path) -> None:
    """Remove an operator's local directory if it has no shards; the whole query's if none of its operators has any."""
    query = operator_directory.parent
    if not any(query.glob(f"*/{SHARD_PREFIX}*")):
        going = [*query.glob("*"), query]
    elif not any(operator_directory.glob(f"{SHARD_PREFIX}*")):
        going = [operator_directory]
    else:
        return
    for folder in going:
        shutil.rmtree(folder / RUNS, ignore_errors=True)
        with suppress(OSError):  # not empty
            folder.rmdir()


def remove_old_runs(query_directory: Path) -> None:
    """Remove the notes of a query's runs, except the newest `RUNS_KEPT`."""
    for runs in query_directory.glob(f"*/{RUNS}"):
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
    """The background work for an executor's shards; call `run` in its own thread, other methods from any thread."""

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
        self.counters = {"announced": 0, "dropped": 0, "merged": 0, "leftovers": 0, "shards_dropped": 0, "errors": 0}

    def announce(self, message: Committed) -> None:
        """Queue the work after a commit, in place of the shard's queued commit, if any."""
        self._known[message.shard.directory] = message
        self.counters["announced"] += 1
        self.queue.put(message)

    def run(self) -> None:
        self.queue.work(self._handle)

    def _handle(self, message: Committed) -> None:
        try:
            with self._shards.use(message) as backend:
                if message.state_dir is not None:
                    in_memory = find_backend(message.shard.backend).in_memory
                    self._use.called(message.shard.directory, in_memory=in_memory)
                self._keep(message, backend)
            self._drop_idle(self._use.idle_siblings(message.shard.directory))
        except NotFoundError as exc:
            # The version was dropped, or the query removed or restarted: a later announcement covers the work.
            _log.info("nothing to do for %r: %s", message, exc)
        except HoldfastError:
            self.counters["errors"] += 1
            _log.exception("housekeeping failed for %r; will retry after the next commit", message)

    def _keep(self, message: Committed, backend: Backend) -> None:
        if message.accepted is not None:
            self.counters["dropped"] += len(VersionedStore(backend).prune(message.accepted))
        self.counters["merged"] += backend.maintain(message.committed)
        now_ms = self._now_ms()
        if abs(now_ms - self._swept_ms.get(message.shard.directory, 0)) >= LEFTOVER_EVERY_MS:  # the clock may go back
            self._swept_ms[message.shard.directory] = now_ms
            before_ns = (now_ms - LEFTOVER_KEPT_MS) * 1_000_000
            self.counters["leftovers"] += backend.remove_leftovers(before_ns)
            with self._logs.log_of(message) as log:
                if log is not None:
                    self.counters["leftovers"] += log.snapshots.remove_leftovers(before_ns)

    def tidy_up(self) -> None:
        """Drop idle shards, forget removed shards, and close unneeded storages; called periodically."""
        self._use.count_existing(self._shards.root)
        self._drop_idle(self._use.idle())
        for directory in list(self._known):
            if not os.path.exists(directory):  # `Path.exists` may raise on a disk error and end the server
                self._forget(directory)
        for query in {Path(directory).parent.parent for directory in list(self._known)}:  # announcements add entries
            with suppress(OSError):  # notes that cannot be listed stay
                remove_old_runs(query)
        self._shards.close_unused()
        self._logs.close_unused(list(self._known.values()))

    def _drop_idle(self, directories: Iterable[str]) -> None:
        """Remove the local state of idle shards."""
        for directory in directories:
            try:
                if self._shards.remove(Path(directory)):
                    self.counters["shards_dropped"] += 1
                    self._forget(directory)
                    remove_if_empty(Path(directory).parent)
                    _log.info("dropped %s, which this executor no longer uses", directory)
            except (HoldfastError, OSError) as exc:  # a shard on a damaged disk must not block the others
                self.counters["errors"] += 1
                _log.warning("cannot remove %s, which this executor no longer uses: %s", directory, exc)

    def _forget(self, directory: str) -> None:
        self.queue.forget(directory)
        self._known.pop(directory, None)
        self._swept_ms.pop(directory, None)
        self._use.forget(directory)
        self._forget_elsewhere(directory)

    def statistics(self) -> dict[str, Any]:
        """Return the counters, and each shard's statistics or error by directory."""
        shards: dict[str, Any] = {}
        for directory, message in list(self._known.items()):
            if os.path.exists(directory):
                try:
                    with self._shards.use(message) as backend:
                        shards[directory] = asdict(backend.statistics())
                except HoldfastError as exc:
                    shards[directory] = {"error": str(exc)}
        return {"pid": os.getpid(), "counters": dict(self.counters), "shards": shards}
