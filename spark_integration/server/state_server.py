"""The state server: one process per executor.

It runs the work that no micro-batch should wait for: `housekeeping` and `snapshotting`. It may be killed at any time:
the next task starts a new server, and nothing is lost.

It serves Arrow Flight on a Unix socket that only this user can open. It holds a lock while it runs. It ends with its
executor, or when its lock file or socket is gone: a second server may then run, which would see its shards as idle.

Its actions::

    ping                        check that the server is alive
    committed                   announce a shard's new version; returns news of its snapshots
    snapshot                    write a shard's snapshot now
    statistics                  return counters, and sizes and errors of shards
    recent                      return the measures of the last micro-batches
    drain                       wait until all announced work is done
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from holdfast import clock
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.spark_integration.client.messages import Committed, decode, encode_error, field
from holdfast.spark_integration.executor import local_dirs, takeover
from holdfast.spark_integration.executor.processes import ProcessId
from holdfast.spark_integration.server.exposition import Exposition, MeasuredBatches, ServerMetrics
from holdfast.spark_integration.server.housekeeping import Housekeeping, ShardUse
from holdfast.spark_integration.server.open_shards import DurableLogs, OpenShards
from holdfast.spark_integration.server.snapshotting import Snapshotting

CLEAN_EVERY_SECONDS = 300.0
#: Per storage. Each thread holds a part of a file, so their number bounds the memory of uploads.
UPLOAD_THREADS = 4
END_WITHIN_SECONDS = 20.0
_FILES_IF_UNLIMITED = 1 << 16
LOG_BYTES_MAX = 16 << 20
_log = logging.getLogger("holdfast.state_server")


class StateService(flight.FlightServerBase):
    """Serves the actions above."""

    def __init__(
        self,
        location: str,
        housekeeping: Housekeeping,
        snapshotting: Snapshotting,
        batches: MeasuredBatches,
        exposition: Exposition,
    ) -> None:
        self._housekeeping = housekeeping
        self._snapshotting = snapshotting
        self._batches = batches
        self._exposition = exposition
        super().__init__(location)  # last, because it starts serving

    def do_action(self, context: object, action: flight.Action) -> Iterator[bytes]:
        """Answer an action with a JSON value or a `HoldfastError`; log other errors as defects."""
        try:
            answer = self._act(action.type, action.body.to_pybytes())
            return iter([json.dumps(answer).encode()])
        except HoldfastError as exc:
            raise flight.FlightServerError(type(exc).__name__, extra_info=encode_error(exc)) from exc
        except Exception:
            _log.exception("%r failed", action.type)
            raise

    def _act(self, kind: str, body: bytes) -> Any:
        if kind == "ping":
            return None
        if kind == "committed":
            committed = Committed.of_bytes(body)
            self._housekeeping.announce(committed)
            news = self._snapshotting.announce(committed)
            self._batches.announce(committed)
            self._exposition.announce(committed)  # last, because it may wait for DNS
            return asdict(news)
        if kind == "recent":
            return self._batches.recent()
        if kind == "snapshot":
            return self._snapshotting.write_now(Committed.of_bytes(body))
        if kind == "statistics":
            return self._statistics()
        if kind == "drain":
            return self._drain(field(decode(body), "timeout_seconds", float))
        raise InvalidArgumentError("no such action", action=kind)

    def _statistics(self) -> dict[str, Any]:
        found = self._housekeeping.statistics()
        found["counters"] |= self._snapshotting.counters
        found["counters"]["metrics_errors"] = self._exposition.failures
        return found | {
            "metrics_port": self._exposition.port,
            "snapshot_errors": self._snapshotting.errors(),
        }

    def _drain(self, timeout_seconds: float) -> bool:
        end_ms = clock.monotonic_ms() + int(timeout_seconds * 1000)
        queues = (self._housekeeping.queue, self._snapshotting.queue)
        drained = [queue.drain(max(0, end_ms - clock.monotonic_ms()) / 1000) for queue in queues]
        return all(drained)


def serve(executor_directory: Path, executor: ProcessId, socket: Path, lock: int) -> None:
    """Serve until the executor ends, then clean up; return at once if workers no longer find the server."""
    socket.unlink(missing_ok=True)
    shards = OpenShards(executor_directory)
    shards.finish_removals()
    logs = DurableLogs(partial(ThreadPoolExecutor, UPLOAD_THREADS, thread_name_prefix="holdfast-io"))
    snapshotting = Snapshotting(shards, logs)
    batches = MeasuredBatches()

    def forget(directory: str) -> None:
        snapshotting.forget(directory)
        batches.forget(directory)

    housekeeping = Housekeeping(shards, logs, ShardUse(), forget)

    def counters() -> dict[str, int]:
        return housekeeping.counters | snapshotting.counters

    exposition = Exposition(ServerMetrics(batches, counters, snapshotting.ages_ms))
    workers = [
        threading.Thread(target=work.run, name=type(work).__name__, daemon=True)
        for work in (housekeeping, snapshotting)
    ]
    for worker in workers:
        worker.start()
    server = StateService(f"grpc+unix://{socket}", housekeeping, snapshotting, batches, exposition)
    os.chmod(socket, 0o600)
    _log.info("serving executor %s from process %d", executor, os.getpid())
    if not _tidy_up_until_end(housekeeping, executor_directory, executor, socket, lock):
        return
    exposition.close()
    housekeeping.queue.end()
    snapshotting.queue.end()
    _finish(server, shards, workers)
    takeover.leave_executor_directory(executor_directory)


def _tidy_up_until_end(
    housekeeping: Housekeeping, executor_directory: Path, executor: ProcessId, socket: Path, lock: int
) -> bool:
    """Tidy up periodically; return True when the executor ends, False when workers no longer find the server."""
    while True:
        with suppress(OSError):  # so that tmp cleaners spare the lock file, which is never written
            os.utime(lock)
        # executor_directory = <root>/holdfast-<user>/executor-…
        takeover.remove_dead_executors(executor_directory.parent.parent, clock.now_ms())
        local_dirs.remove_old_logs(clock.now_ms())
        housekeeping.tidy_up()
        if executor.wait(CLEAN_EVERY_SECONDS):
            _log.info("executor %s has ended", executor)
            return True
        if not local_dirs.is_found(executor_directory, socket, lock):
            _log.warning(
                "the state server ends: its lock file or socket was removed; exclude %s from tmp cleaners",
                executor_directory,
            )
            return False


def _finish(server: StateService, shards: OpenShards, workers: list[threading.Thread]) -> None:
    """Stop the server and its threads and close the shards within a bounded time; abandon what hangs."""
    end_ms = clock.monotonic_ms() + int(END_WITHIN_SECONDS * 1000)

    def left_seconds() -> float:
        return max(0, end_ms - clock.monotonic_ms()) / 1000

    # Shutdown waits for running calls, and a worker may outlive its executor.
    shutting = threading.Thread(target=server.shutdown, name="shutdown", daemon=True)
    shutting.start()
    shutting.join(left_seconds() / 4)
    for worker in workers:
        worker.join(left_seconds() / 3)
    closing = threading.Thread(target=shards.close, args=(left_seconds() / 2,), name="close", daemon=True)
    closing.start()
    closing.join(left_seconds())


class _NoPandas:
    """An import hook that hides pandas."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is hidden from pyarrow", name=name)


def _convert_without_pandas() -> None:
    """Keep pyarrow from importing pandas, which costs 57 MB and a second of CPU; the server does not need it."""
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array(np.zeros(1)).to_numpy()
    finally:
        sys.meta_path.remove(finder)


def _raise_file_limit() -> None:
    """Raise the limit on open files as far as the system allows: databases keep many open, and defaults are low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_IF_UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # the kernel has a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _restore_memory_limit(executor: ProcessId) -> None:
    """Replace the inherited limit on address space by the executor's; warn if only root may raise it."""
    if sys.platform != "linux":
        return  # Spark limits workers only on Linux
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, resource.prlimit(executor.pid, resource.RLIMIT_AS))
    except (ValueError, OSError):
        if limit != resource.RLIM_INFINITY:
            _log.warning(
                "the state server is limited to %d MB of address space: unset spark.executor.pyspark.memory",
                limit >> 20,
            )


class ServerLog(RotatingFileHandler):
    """The server's log, with one older file; native code's output goes to it, too."""

    def doRollover(self) -> None:
        super().doRollover()
        with open(self.baseFilename, "ab") as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)


def _die_loudly(failure: threading.ExceptHookArgs) -> None:
    _log.critical("the state server ends: a thread failed", exc_info=failure.exc_value)
    os._exit(1)


def main() -> None:
    """Read the configuration from standard input and serve."""
    os.umask(0o077)
    _raise_file_limit()
    _convert_without_pandas()
    configuration = json.load(sys.stdin)
    directory = Path(configuration["executor_directory"])
    log = ServerLog(local_dirs.log_path(directory), maxBytes=LOG_BYTES_MAX, backupCount=1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[log])
    threading.excepthook = _die_loudly
    executor = ProcessId.parse(configuration["executor"])
    if executor is None:
        raise SystemExit(f"invalid executor: {configuration['executor']!r} is no process id and start time")
    _restore_memory_limit(executor)
    served = False
    try:
        # The process inherited the lock from its parent, and releases it when it ends.
        serve(directory, executor, Path(configuration["socket"]), configuration["lock"])
        served = True
    finally:
        if not served:
            _log.critical("the state server ends", exc_info=True)
        # Abandon unfinished merges and uploads, which have published nothing, and threads that would hold the lock.
        os._exit(0 if served else 1)


if __name__ == "__main__":
    main()
