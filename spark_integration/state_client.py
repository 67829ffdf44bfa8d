"""A worker's side of the state server: announces commits, and starts the server where there is none.

No batch waits for the server and none fails without it: a commit is complete before it is announced, and
what the server has not done yet it does at the next announcement.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.errors import HoldfastError, UnavailableError
from holdfast.snapshotter.operator_record import encode_schemas
from holdfast.spark_integration import local_dirs
from holdfast.spark_integration.processes import executor_process
from holdfast.spark_integration.state_messages import Committed
from holdfast.spark_integration.task import storage_options

if TYPE_CHECKING:
    from holdfast.spark_integration.shard_call import Operator, ShardStore

CALL_TIMEOUT_SECONDS = 5.0
ANNOUNCE_TIMEOUT_SECONDS = 2.0
START_AGAIN_AFTER_MS = 10_000

_log = logging.getLogger(__name__)


class StateClient:
    """Calls the state server of one executor. One instance a process; see `client_of`."""

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
        UnavailableError
            No server listens, or it did not answer in time.
        """
        if not self._socket.exists():
            raise UnavailableError("no state server listens", socket=str(self._socket))
        if self._flight is None:
            self._flight = flight.FlightClient(f"grpc+unix://{self._socket}")
        try:
            options = flight.FlightCallOptions(timeout=timeout_seconds)
            answers = list(self._flight.do_action(flight.Action(action, body), options))
        except (flight.FlightError, pa.ArrowException, OSError) as exc:
            self.close()
            if isinstance(exc, flight.FlightTimedOutError):
                self._timed_out_ms = clock.monotonic_ms()
            raise UnavailableError(
                "the state server did not answer; see its log",
                log=str(local_dirs.log_path(self._directory)),
                error=type(exc).__name__,
            ) from exc
        return json.loads(answers[0].body.to_pybytes()) if answers else None

    @property
    def has_just_timed_out(self) -> bool:
        """Whether a call timed out a moment ago: the next one would probably wait as long."""
        return self._timed_out_ms is not None and clock.monotonic_ms() - self._timed_out_ms < START_AGAIN_AFTER_MS

    def start_server(self) -> None:
        """Start a server unless this process did so a moment ago; of several that start, one stays.

        Raises
        ------
        HoldfastError, OSError
            No process can be started, or its log cannot be written.
        """
        now_ms = clock.monotonic_ms()
        if self._started is not None and self._started.poll() is None:
            return  # it starts, or it does not answer; a second one would end at the first one's lock
        if self._started_ms is not None and now_ms - self._started_ms < START_AGAIN_AFTER_MS:
            return
        self._started_ms = now_ms
        configuration = {
            "executor_directory": str(self._directory),
            "executor": str(executor_process()),
            "socket": str(self._socket),
        }
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        local_dirs.make_log_directory()
        with open(local_dirs.log_path(self._directory), "ab") as log:
            self._started = subprocess.Popen(
                [sys.executable, "-m", "holdfast.spark_integration.state_server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert self._started.stdin is not None
        with self._started.stdin as stdin:
            stdin.write(json.dumps(configuration).encode())

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._flight is not None:
            self._flight.close()
            self._flight = None


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
        directory=str(opened.directory),
        backend=settings.backend,
        backend_options=dict(settings.backend_options),
        tables=encode_schemas(opened.backend.tables),
        accepted=str(accepted) if accepted else None,
        committed=str(committed),
        prefix=opened.prefix,
        checkpoint_dir=settings.checkpoint_dir,
        storage_options=storage_options(settings),
        snapshot_max_commits=settings.snapshot_max_commits,
    )
    if client.has_just_timed_out:
        return False
    try:
        client.call("committed", message.encode(), ANNOUNCE_TIMEOUT_SECONDS)
    except UnavailableError as exc:
        _log.info("%s", exc)
        _start_server(client)
        return False
    return True


def _start_server(client: StateClient) -> None:
    try:
        client.start_server()
    except (HoldfastError, OSError) as exc:
        _log.warning("no state server can be started; it is tried again later: %s", exc)
