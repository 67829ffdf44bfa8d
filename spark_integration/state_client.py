"""A worker's connection to the state server: starts it where there is none, calls it, announces commits.

A backend on run files needs no server: no batch waits for it and none fails without it, since a commit is complete
before it is announced, and what the server has not done yet it does at the next announcement. A backend with one owner
is used through the server (`remote_backend`), so a batch waits until one listens.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.errors import HoldfastError, UnavailableError
from holdfast.spark_integration import local_dirs
from holdfast.spark_integration.processes import executor_process
from holdfast.spark_integration.state_messages import Committed, Message, decode_error, encode
from holdfast.spark_integration.task import storage_options

if TYPE_CHECKING:
    from holdfast.spark_integration.shard_call import Operator, ShardStore

CALL_TIMEOUT_SECONDS = 5.0
ANNOUNCE_TIMEOUT_SECONDS = 2.0
START_WITHIN_SECONDS = 60.0
START_AGAIN_AFTER_MS = 10_000
_LOOK_EVERY_SECONDS = 0.02
_LOG_LINES_SHOWN = 15
# An error comes in the trailer of a call, which gRPC otherwise limits to 8 KB; a channel of its own per client, since
# channels to one address would share the pause that gRPC makes after a failed connection.
_CHANNEL = [("grpc.max_metadata_size", 1 << 20), ("grpc.use_local_subchannel_pool", 1)]
# What bounds the memory of the server besides the budgets of backends: each malloc arena keeps what was freed in it.
_SERVER_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}

_log = logging.getLogger(__name__)


class ServerLostError(UnavailableError):
    """The state server ended or does not answer: begin again, and what it held is recovered."""


class StateClient:
    """Calls the state server of one executor. One instance a process; see `client_of`.

    Notes
    -----
    Threads: any.
    """

    def __init__(self, executor_directory: Path) -> None:
        self._directory = executor_directory
        self._socket = local_dirs.socket_path(executor_directory)
        self._flight: flight.FlightClient | None = None
        self._started: subprocess.Popen[bytes] | None = None
        self._started_ms: int | None = None
        self._timed_out_ms: int | None = None

    def call(self, action: str, body: bytes = b"", timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> Any:
        """Return the server's JSON answer to an action.

        Raises
        ------
        ServerLostError
            No server listens, or it did not answer in time.
        HoldfastError
            What the server answered, of the same class as there.
        """
        with self.connected() as connection:
            options = flight.FlightCallOptions(timeout=timeout_seconds)
            answers = list(connection.do_action(flight.Action(action, body), options))
        return json.loads(answers[0].body.to_pybytes()) if answers else None

    def exchange(self, message: Message, timeout_seconds: float | None) -> tuple[Any, Any]:
        """Begin an exchange; return its writer and its reader, whose calls stand inside `connected` too.

        Parameters
        ----------
        timeout_seconds : float or None
            For the whole exchange; None for one that lives as long as what it stands for.
        """
        with self.connected() as connection:
            options = flight.FlightCallOptions(timeout=timeout_seconds)
            writer, reader = connection.do_exchange(flight.FlightDescriptor.for_command(encode(message)), options)
            return writer, reader

    @contextmanager
    def connected(self) -> Iterator[flight.FlightClient]:
        """Map the errors of a call, and forget the connection when it broke."""
        if not self._socket.exists():
            raise ServerLostError("no state server listens", socket=str(self._socket))
        if self._flight is None:
            self._flight = flight.FlightClient(f"grpc+unix://{self._socket}", generic_options=_CHANNEL)
        try:
            yield self._flight
        except (flight.FlightError, pa.ArrowException, OSError) as exc:
            raise self._mapped(exc) from exc

    def _mapped(self, exc: Exception) -> HoldfastError:
        answered = decode_error(getattr(exc, "extra_info", None) or b"")
        if answered is not None:
            return answered
        log = str(local_dirs.log_path(self._directory))
        if isinstance(exc, flight.FlightServerError):
            return HoldfastError("the state server failed; see its log", log=log, error=str(exc)[:200])
        self.close()
        if isinstance(exc, flight.FlightTimedOutError):
            self._timed_out_ms = clock.monotonic_ms()
        return ServerLostError("the state server did not answer; see its log", log=log, error=type(exc).__name__)

    @property
    def has_just_timed_out(self) -> bool:
        """Whether a call timed out a moment ago: the next one would probably wait as long."""
        return self._timed_out_ms is not None and clock.monotonic_ms() - self._timed_out_ms < START_AGAIN_AFTER_MS

    def require_server(self, within_seconds: float = START_WITHIN_SECONDS) -> None:
        """Return when a server answers; start one where none runs.

        Raises
        ------
        UnavailableError
            None answers in time; says where its log is, and shows the end.
        """
        end_ms = clock.monotonic_ms() + int(within_seconds * 1000)
        while True:
            try:
                return self.call("ping")
            except ServerLostError as exc:
                if clock.monotonic_ms() > end_ms:
                    raise UnavailableError(
                        "the state server does not start, and this backend needs it; its log ends with: "
                        + (self._end_of_log() or "nothing"),
                        log=str(local_dirs.log_path(self._directory)),
                    ) from exc
            if self._started is None or self._started.poll() is not None:
                self._start()
            threading.Event().wait(_LOOK_EVERY_SECONDS)

    def _end_of_log(self) -> str:
        try:
            lines = local_dirs.log_path(self._directory).read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join(lines[-_LOG_LINES_SHOWN:])

    def start_server(self) -> None:
        """Start a server unless one runs, or this process started one a moment ago.

        Raises
        ------
        HoldfastError, OSError
            No process can be started, or its log cannot be written.
        """
        now_ms = clock.monotonic_ms()
        if self._started is not None and self._started.poll() is None:
            return  # it starts, or it does not answer
        if self._started_ms is None or now_ms - self._started_ms >= START_AGAIN_AFTER_MS:
            self._start()

    def _start(self) -> None:
        lock = local_dirs.take_lock(self._directory)
        if lock is None:
            return  # a server of another process runs, or is on its way up
        try:
            self._started_ms = clock.monotonic_ms()
            self._started = self._server_process(lock)
        finally:
            # The new process has it, and there is none when it has ended, however.
            os.close(lock)
        configuration = {
            "executor_directory": str(self._directory),
            "executor": str(executor_process()),
            "socket": str(self._socket),
        }
        assert self._started.stdin is not None
        with self._started.stdin as stdin:
            stdin.write(json.dumps(configuration).encode())

    def _server_process(self, lock: int) -> subprocess.Popen[bytes]:
        environment = {**_SERVER_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        local_dirs.make_log_directory()
        with open(local_dirs.log_path(self._directory), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "holdfast.spark_integration.state_server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=[lock],
            )

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        connection, self._flight = self._flight, None
        if connection is not None:
            connection.close()


_clients: dict[tuple[int, Path], StateClient] = {}


def client_of(executor_directory: Path) -> StateClient:
    """Return this process's client of an executor's state server."""
    key = (os.getpid(), executor_directory)
    if key not in _clients:
        _clients[key] = StateClient(executor_directory)
    return _clients[key]


def announce(operator: Operator, opened: ShardStore, *, accepted: Pointer | None, committed: Pointer) -> bool:
    """Tell the state server of a commit, and start one where none answers.

    Returns
    -------
    bool
        Whether a server took note.
    """
    client = client_of(opened.executor_directory)
    settings = operator.settings
    message = Committed(
        shard=opened.shard,
        accepted=accepted,
        committed=committed,
        prefix=opened.prefix,
        checkpoint_dir=settings.checkpoint_dir,
        storage_options=storage_options(settings),
        snapshot_max_commits=settings.snapshot_max_commits,
    )
    if client.has_just_timed_out:
        return False
    try:
        client.call("committed", message.encode(), ANNOUNCE_TIMEOUT_SECONDS)
    except HoldfastError as exc:
        _log.info("%s", exc)
        _start_server(client)
        return False
    return True


def _start_server(client: StateClient) -> None:
    try:
        client.start_server()
    except (HoldfastError, OSError) as exc:
        _log.warning("no state server can be started; it is tried again later: %s", exc)
