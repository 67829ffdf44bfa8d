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
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.flight as flight

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.errors import UnavailableError
from holdfast.snapshotter.operator_record import encode_schemas
from holdfast.spark_integration import local_dirs
from holdfast.spark_integration.processes import executor_process
from holdfast.spark_integration.state_messages import Committed
from holdfast.spark_integration.task import storage_options

if TYPE_CHECKING:
    from holdfast.spark_integration.shard_call import Operator, ShardStore

CALL_TIMEOUT_SECONDS = 5.0
START_AGAIN_AFTER_MS = 10_000
_SOCKET_PATH_LIMIT = 100

_log = logging.getLogger(__name__)


def socket_path(executor_directory: Path) -> Path:
    """Return where the state server of an executor listens; Unix allows some 107 bytes for it."""
    path = executor_directory / "state-server.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
        return path
    return local_dirs.user_directory(Path(tempfile.gettempdir())) / f"{executor_directory.name}.sock"


def log_path(executor_directory: Path) -> Path:
    """Return the state server's log file, which outlives the executor."""
    folder = local_dirs.user_directory(Path(tempfile.gettempdir())) / "logs"
    return local_dirs.private_directory(folder) / f"state-server-{executor_directory.name}.log"


class StateClient:
    """Calls the state server of one executor. One instance a process; see `client_of`."""

    def __init__(self, executor_directory: Path) -> None:
        self._directory = executor_directory
        self._socket = socket_path(executor_directory)
        self._flight: flight.FlightClient | None = None
        self._started: subprocess.Popen[bytes] | None = None
        self._started_ms: int | None = None

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
        except (flight.FlightError, OSError) as exc:
            self.close()
            raise UnavailableError(
                "the state server did not answer; see its log",
                log=str(log_path(self._directory)),
                error=type(exc).__name__,
            ) from exc
        return json.loads(answers[0].body.to_pybytes()) if answers else None

    def start_server(self) -> None:
        """Start a server unless this process did so a moment ago; of several that start, one stays."""
        now_ms = clock.monotonic_ms()
        if self._started is not None:
            self._started.poll()
        if self._started_ms is not None and now_ms - self._started_ms < START_AGAIN_AFTER_MS:
            return
        self._started_ms = now_ms
        configuration = {
            "executor_directory": str(self._directory),
            "executor": str(executor_process()),
            "socket": str(self._socket),
        }
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with open(log_path(self._directory), "ab") as log:
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
        tables=encode_schemas(opened.backend.tables),
        accepted=str(accepted) if accepted else None,
        committed=str(committed),
        prefix=opened.prefix,
        checkpoint_dir=settings.checkpoint_dir,
        storage_options=storage_options(settings),
        snapshot_max_commits=settings.snapshot_max_commits,
    )
    try:
        client.call("committed", message.encode())
    except UnavailableError as exc:
        _log.info("%s", exc)
        client.start_server()
        return False
    return True
