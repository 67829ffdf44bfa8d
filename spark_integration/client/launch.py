"""Starts an executor's state server, from the first worker that finds none.

The server inherits a lock from the worker, so an executor never has two: a worker that does not get the lock knows that
a server runs or is starting. Its configuration comes on standard input, its environment from Spark's
worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast import clock
from holdfast.errors import UnavailableError
from holdfast.spark_integration.client.messages import ServerLostError
from holdfast.spark_integration.executor import server_files
from holdfast.spark_integration.executor.processes import executor_process

START_WITHIN_SECONDS = 60.0
START_TRIES = 3
START_AGAIN_AFTER_MS = 10_000
_LOOK_EVERY_MS = 20
_LOG_LINES_SHOWN = 15
# Return freed memory to the system: the budget is for the whole process. Two shards of 600,000 keys with commits of
# 100,000 and a budget of 384 MiB peak at 280 and 283 MiB, against 422 and 433 with two malloc arenas and nothing else,
# for the same CPU time. The user's environment takes precedence.
_SERVER_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}


class ServerLaunch:
    """Starts the state server of one executor.

    Attributes
    ----------
    process : subprocess.Popen or None
        The last server that this process started, whether or not it still runs.

    Notes
    -----
    Threads: any.
    """

    def __init__(self, executor_directory: Path) -> None:
        self._directory = executor_directory
        self.process: subprocess.Popen[bytes] | None = None
        self._began_ms: int | None = None

    @property
    def log_path(self) -> Path:
        """The server's log file."""
        return server_files.log_path(self._directory)

    def wait_for(self, ping: Callable[[], object], within_seconds: float) -> None:
        """Wait until `ping` stops raising ServerLostError; start a server if none runs.

        Raises
        ------
        UnavailableError
            None answers in time; says where its log is, and shows the end.
        """
        end_ms = clock.monotonic_ms() + int(within_seconds * 1000)
        failed = 0
        while True:
            try:
                ping()
                return
            except ServerLostError as exc:
                if failed >= START_TRIES or clock.monotonic_ms() > end_ms:
                    raise UnavailableError(
                        "the state server, which this backend needs, does not start; its log ends with: "
                        + (self._end_of_log() or "nothing"),
                        log=str(self.log_path),
                    ) from exc
            if self.process is not None and self.process.poll() is not None:
                failed += self.process.returncode != 0
                self.process = None
            if self.process is None:
                self._start()
            clock.sleep_ms(_LOOK_EVERY_MS)

    def start_unless_just_started(self) -> None:
        """Start a server unless one runs, or this process started one a moment ago.

        Raises
        ------
        HoldfastError
            No process can be started, or its log cannot be written.
        """
        now_ms = clock.monotonic_ms()
        if self.process is not None and self.process.poll() is None:
            return  # it starts, or it does not answer
        if self._began_ms is None or now_ms - self._began_ms >= START_AGAIN_AFTER_MS:
            self._start()

    def _end_of_log(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join(lines[-_LOG_LINES_SHOWN:])

    def _start(self) -> None:
        lock = server_files.take_lock(self._directory)
        if lock is None:
            return  # a server of another process runs, or is starting
        self._began_ms = clock.monotonic_ms()
        configuration = {
            "executor_directory": str(self._directory),
            "executor": str(executor_process()),
            "socket": str(server_files.socket_path(self._directory)),
            "lock": lock,
        }
        try:
            self.process = self._server_process(lock)
            assert self.process.stdin is not None
            with suppress(BrokenPipeError), self.process.stdin as stdin:  # it ended at once: its log says why
                stdin.write(json.dumps(configuration).encode())
        except OSError as exc:
            raise UnavailableError(f"no state server can be started: {exc}", python=sys.executable) from exc
        finally:
            os.close(lock)  # the new process has inherited it

    def _server_process(self, lock: int) -> subprocess.Popen[bytes]:
        environment = {**_SERVER_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        server_files.make_log_directory()
        private = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(private, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "holdfast.spark_integration.server.state_server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=[lock],
            )
