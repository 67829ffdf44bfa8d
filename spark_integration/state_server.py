"""The state server: one process for each executor, which does what no micro-batch should wait for.

It merges large runs, drops versions that the query has left behind, writes snapshots so that chains of
commits stay short, removes what dead executors left, and keeps statistics. It owns nothing that a
micro-batch needs: it may be killed at any time, and the next task starts another.

It listens with Arrow Flight on a Unix socket in a directory that only this user can enter, holds a lock as
long as it runs, so that an executor has one, and ends when its executor does.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.flight as flight

from holdfast import clock
from holdfast.backends.base import Backend, Pointer
from holdfast.backends.registry import find_backend
from holdfast.errors import HoldfastError, NotFoundError
from holdfast.mvcc import VersionedStore
from holdfast.snapshotter.commits import ObjectCommitLog, SnapshotPolicy, chain_of
from holdfast.snapshotter.storage import ObjectStorage, open_storage, parse_storage_options
from holdfast.spark_integration import dead_executors, local_dirs
from holdfast.spark_integration.processes import ProcessId
from holdfast.spark_integration.state_messages import Committed

LEFTOVER_AGE_MS = 10 * 60_000
LEFTOVER_EVERY_MS = 60_000
CLEAN_EVERY_SECONDS = 300.0
END_WITHIN_SECONDS = 20.0
STORAGES_KEPT = 8

_log = logging.getLogger("holdfast.state_server")


class Housekeeping:
    """The background work of an executor's shards, newest announcement of each shard first come.

    Notes
    -----
    Threads: `announce`, `drain` and `statistics` from any; `run` in one thread of its own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, Committed] = OrderedDict()
        self._known: dict[str, Committed] = {}
        self._working = False
        self._ending = False
        self._swept_ms: dict[str, int] = {}
        self._storages: dict[tuple[str, tuple[tuple[str, str], ...]], ObjectStorage] = {}
        self._io = ThreadPoolExecutor(2, thread_name_prefix="holdfast-io")
        self.counters = {"announced": 0, "dropped": 0, "merged": 0, "snapshots": 0, "leftovers": 0, "errors": 0}

    def announce(self, message: Committed) -> None:
        """Take note of a commit; of several waiting for one shard, the newest is worked on."""
        with self._changed:
            self._waiting[message.directory] = message
            self._known[message.directory] = message
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
                self._keep(message)
            except NotFoundError as exc:
                # The version was dropped, or the query removed: a later announcement has caught up.
                _log.info("nothing to do for %r: %s", message, exc)
            except HoldfastError:
                self.counters["errors"] += 1
                _log.exception("housekeeping failed for %r; it is tried again after the next commit", message)

    def _keep(self, message: Committed) -> None:
        backend = _backend_of(message)
        log = self._commit_log(message)
        store = VersionedStore(backend, log)
        if message.accepted is not None:
            accepted = Pointer.parse(message.accepted)
            self.counters["dropped"] += len(store.prune(accepted))
            if log is not None:
                self._snapshot(backend, log, accepted, SnapshotPolicy(message.snapshot_max_commits))
        self.counters["merged"] += backend.maintain(Pointer.parse(message.committed))
        now_ms = clock.now_ms()
        if now_ms - self._swept_ms.get(message.directory, 0) >= LEFTOVER_EVERY_MS:
            self._swept_ms[message.directory] = now_ms
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
        notes = Path(message.directory) / "snapshots"
        return ObjectCommitLog(self._storages[key], message.prefix, message.schemas(), self._io, notes)

    def statistics(self) -> dict[str, Any]:
        """Return counters, and by shard directory what the shard occupies."""
        with self._changed:
            known = dict(self._known)
        shards = {}
        for directory, message in known.items():
            if Path(directory).exists():
                shards[directory] = asdict(_backend_of(message).statistics())
        return {"pid": os.getpid(), "counters": dict(self.counters), "shards": shards}


def _backend_of(message: Committed) -> Backend:
    directory = Path(message.directory)
    # <executor directory>/<memory or disk>/<query>/<operator>/<shard>
    executor_directory = directory.parents[3]
    backend = find_backend(message.backend)
    return backend(directory, message.schemas(), clock.new_id, message.backend_options, executor_directory)


class StateServer(flight.FlightServerBase):
    """Answers workers: ``ping``, ``committed``, ``statistics``, ``drain``."""

    def __init__(self, location: str, housekeeping: Housekeeping) -> None:
        super().__init__(location)
        self._housekeeping = housekeeping

    def do_action(self, context: object, action: flight.Action) -> Iterator[bytes]:
        """Answer one action with one JSON value."""
        body = action.body.to_pybytes()
        answer: Any = None
        if action.type == "committed":
            self._housekeeping.announce(Committed.decode(body))
        elif action.type == "statistics":
            answer = self._housekeeping.statistics()
        elif action.type == "drain":
            answer = self._housekeeping.drain(float(body))
        elif action.type != "ping":
            raise flight.FlightServerError(f"no such action: {action.type}")
        return iter([json.dumps(answer).encode()])


def serve(executor_directory: Path, executor: ProcessId, socket: Path) -> None:
    """Run the server until its executor ends, then remove what no later executor can use."""
    socket.unlink(missing_ok=True)
    housekeeping = Housekeeping()
    worker = threading.Thread(target=housekeeping.run, name="housekeeping", daemon=True)
    worker.start()
    server = StateServer(f"grpc+unix://{socket}", housekeeping)
    os.chmod(socket, 0o600)
    _log.info("serving executor %s from process %d", executor, os.getpid())
    has_ended = False
    while not has_ended:
        # executor_directory = <root>/holdfast-<user>/executor-…
        dead_executors.remove_dead_executors(executor_directory.parent.parent, clock.now_ms())
        local_dirs.remove_old_logs(clock.now_ms())
        has_ended = executor.wait(CLEAN_EVERY_SECONDS)
    _log.info("executor %s has ended", executor)
    server.shutdown()
    housekeeping.end()
    worker.join(END_WITHIN_SECONDS)
    dead_executors.leave_executor_directory(executor_directory)


def _die_loudly(failure: threading.ExceptHookArgs) -> None:
    _log.critical("the state server ends: a thread failed", exc_info=failure.exc_value)
    os._exit(1)


def main() -> None:
    """Read the configuration from standard input and serve."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.excepthook = _die_loudly
    configuration = json.load(sys.stdin)
    directory = Path(configuration["executor_directory"])
    executor = ProcessId.parse(configuration["executor"])
    if executor is None:
        raise SystemExit(f"not a process: {configuration['executor']!r}")
    lock = local_dirs.take_lock(directory)
    if lock is None:
        return
    served = False
    try:
        serve(directory, executor, Path(configuration["socket"]))
        served = True
    finally:
        if not served:
            _log.critical("the state server ends", exc_info=True)
        # A merge or upload that did not end in time is abandoned: it has published nothing. And no thread keeps
        # the lock of a server that does not serve.
        os._exit(0 if served else 1)


if __name__ == "__main__":
    main()
