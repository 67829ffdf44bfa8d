"""Calls an executor's state server, and starts it if it is not running.

No micro-batch waits for the server or fails without it: a commit is complete before it is announced, and the server
catches up at the next announcement.

The server inherits a lock from the worker that starts it. If the lock is taken, a server is running or starting.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from holdfast import clock
from holdfast.errors import HoldfastError, UnavailableError
from holdfast.spark_integration.client.measures import merged
from holdfast.spark_integration.client.messages import RecentBatch, decode_error
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.executor.processes import executor_process, kept_per_process

START_WITHIN_MS = 60_000
START_TRIES = 3
START_AGAIN_AFTER_MS = 10_000
_LOOK_EVERY_MS = 20
_LOG_LINES_SHOWN = 15
# Return freed memory to the system, at no cost in CPU time. The user's environment takes precedence.
_SERVER_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}
CALL_TIMEOUT_SECONDS = 5.0
#: Actions that the server answers at once unless it hangs; others wait for the storage.
_ANSWERED_AT_ONCE = frozenset({"ping", "committed"})
_CHANNEL = {
    # Errors come in the trailer of a call, which gRPC limits to 8 KB by default.
    "grpc.max_metadata_size": 1 << 20,
    # Each client has its own channel: channels to the same address share the back-off after a failed connection.
    "grpc.use_local_subchannel_pool": 1,
}
_LOST = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    flight.FlightInternalError,
    OSError,
)
#: Timeout for all servers together, and minimum timeout for each.
_TIMEOUT_SECONDS, _LEAST_SECONDS = 2.0, 0.25
_log = logging.getLogger(__name__)


class StateClient:
    """Calls and starts an executor's state server; one instance per process, thread-safe."""

    def __init__(self, executor_directory: Path) -> None:
        self._directory = executor_directory
        self._socket = local_dirs.socket_path(executor_directory)
        self.process: subprocess.Popen[bytes] | None = None
        self._began_ms: int | None = None
        self._flight: flight.FlightClient | None = None
        self._timed_out_ms: int | None = None

    @property
    def log_path(self) -> Path:
        """The server's log file."""
        return local_dirs.log_path(self._directory)

    def require_server(self) -> None:
        """Wait until a server answers; start it if it is not running. Raises `UnavailableError`."""
        end_ms = clock.monotonic_ms() + START_WITHIN_MS
        failed = 0
        while True:
            try:
                self.call("ping")
                return
            except UnavailableError as exc:
                if failed >= START_TRIES or clock.monotonic_ms() > end_ms:
                    raise UnavailableError(
                        f"the state server did not start; its log ends with: {self._end_of_log() or 'nothing'}",
                        log=str(self.log_path),
                    ) from exc
            if self.process is not None and self.process.poll() is not None:
                failed += self.process.returncode != 0
                self.process = None
            if self.process is None:
                self._start()
            clock.sleep_ms(_LOOK_EVERY_MS)

    def start_server(self) -> None:
        """Start a server unless a server is running or this process has just started one. Raises `HoldfastError`."""
        now_ms = clock.monotonic_ms()
        if self.process is not None and self.process.poll() is None:
            return  # it is starting, or hangs
        if self._began_ms is None or now_ms - self._began_ms >= START_AGAIN_AFTER_MS:
            self._start()

    def _end_of_log(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join(lines[-_LOG_LINES_SHOWN:])

    def _start(self) -> None:
        lock = local_dirs.take_lock(self._directory)
        if lock is None:
            return  # another process's server is running or starting
        self._began_ms = clock.monotonic_ms()
        configuration = {
            "executor_directory": str(self._directory),
            "executor": str(executor_process()),
            "socket": str(self._socket),
            "lock": lock,
        }
        environment = {**_SERVER_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            local_dirs.make_log_directory()
            private = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(private, "ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "holdfast.spark_integration.server.state_server"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                    pass_fds=[lock],
                )
            assert self.process.stdin is not None
            with suppress(BrokenPipeError), self.process.stdin as stdin:  # if it exits at once, see its log
                stdin.write(json.dumps(configuration).encode())
        except OSError as exc:
            raise UnavailableError(f"cannot start a state server: {exc}", python=sys.executable) from exc
        finally:
            os.close(lock)  # the new process has inherited it

    def call(self, action: str, body: bytes = b"", timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> Any:
        """Return the server's JSON answer to an action. Raises `UnavailableError`, `HoldfastError`."""
        options = flight.FlightCallOptions(timeout=timeout_seconds)
        try:
            answers = list(self._connection().do_action(flight.Action(action, body), options))
        except (flight.FlightError, pa.ArrowException, OSError) as exc:
            if action in _ANSWERED_AT_ONCE and isinstance(exc, flight.FlightTimedOutError):
                self._timed_out_ms = clock.monotonic_ms()
            raise self._mapped(exc) from exc
        return json.loads(answers[0].body.to_pybytes()) if answers else None

    def _connection(self) -> flight.FlightClient:
        if self._flight is None:
            if not self._socket.exists():
                raise UnavailableError("no state server is listening", socket=str(self._socket))
            self._flight = flight.FlightClient(f"grpc+unix://{self._socket}", generic_options=[*_CHANNEL.items()])
        return self._flight

    def _mapped(self, exc: Exception) -> HoldfastError:
        """Convert a call's error to holdfast's; close the connection if it broke."""
        answered = decode_error(getattr(exc, "extra_info", None) or b"")
        if answered is not None:
            return answered
        log = str(self.log_path)
        if not isinstance(exc, _LOST):
            return HoldfastError("the state server failed; see its log", log=log, error=str(exc)[:200])
        self.close()
        return UnavailableError("the state server did not answer; see its log", log=log, error=type(exc).__name__)

    @property
    def has_just_timed_out(self) -> bool:
        """Whether a quick call has just timed out: the next call would time out, too."""
        return self._timed_out_ms is not None and clock.monotonic_ms() - self._timed_out_ms < START_AGAIN_AFTER_MS

    def close(self) -> None:
        """Close the connection; the next call opens a new connection."""
        connection, self._flight = self._flight, None
        if connection is not None:
            connection.close()


@kept_per_process()
def client_of(executor_directory: Path) -> StateClient:
    """Return this process's client of an executor's state server."""
    return StateClient(executor_directory)


def over_executors(batches: Iterable[RecentBatch]) -> list[RecentBatch]:
    """Merge each micro-batch's parts from several executors; return the micro-batches, newest first."""
    found: dict[tuple[str, str, int, int | None], RecentBatch] = {}
    for one in batches:
        place = (one.query, one.operator, one.batch_ms, one.batch_id)
        so_far = found.get(place, replace(one, shards=0, values={}))
        values = merged(so_far.values, one.values)
        found[place] = replace(so_far, shards=so_far.shards + one.shards, values=values)
    return sorted(found.values(), key=lambda one: (one.batch_ms, one.batch_id or 0), reverse=True)


def recent_batches(local_dir: str | None = None) -> list[RecentBatch]:
    """Return the last micro-batches of this user's running queries on this machine, oldest first, without Spark."""
    found: list[RecentBatch] = []
    end_ms = clock.monotonic_ms() + int(_TIMEOUT_SECONDS * 1000)
    for root in local_dirs.all_roots(local_dir):
        for directory in sorted(root.glob(f"{local_dirs.user_name()}/executor-*")):
            left_seconds = (end_ms - clock.monotonic_ms()) / 1000
            found += _recent_of(directory, max(left_seconds, _LEAST_SECONDS))
    return sorted(found, key=lambda batch: batch.batch_ms)


def _recent_of(executor_directory: Path, timeout_seconds: float) -> list[RecentBatch]:
    client = StateClient(executor_directory)
    try:
        answer = client.call("recent", timeout_seconds=timeout_seconds)
        return [RecentBatch.read(batch, "the state server's answer") for batch in answer]
    except HoldfastError as exc:
        _log.info("skipping %s: %s", executor_directory, exc)
        return []
    finally:
        client.close()
