"""A worker's connection to its executor's state server: calls the server, and starts it if none runs.

No micro-batch waits for the server or fails without it: a commit is complete before it is announced, and the server
catches up at the next announcement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from holdfast import clock
from holdfast.errors import HoldfastError
from holdfast.spark_integration.client.launch import START_AGAIN_AFTER_MS, START_WITHIN_SECONDS, ServerLaunch
from holdfast.spark_integration.client.messages import ServerLostError, decode_error
from holdfast.spark_integration.executor import server_files
from holdfast.spark_integration.executor.per_process import kept_per_process

CALL_TIMEOUT_SECONDS = 5.0
#: What a server answers at once unless it hangs; others, such as "snapshot", take as long as the storage does.
_ANSWERED_AT_ONCE = frozenset({"ping", "committed"})
_CHANNEL = {
    # Errors come in the trailer of a call, which gRPC limits to 8 KB by default.
    "grpc.max_metadata_size": 1 << 20,
    # Each client has its own channel: those to one address would share the back-off after a failed connection.
    "grpc.use_local_subchannel_pool": 1,
    # A scan has no time limit, as none fits all states; a server that is stopped or hangs answers no pings, and what
    # waits for it fails. Flight's servers end connections that ping more often than every 300 s.
    "grpc.keepalive_time_ms": 330_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.http2.ping_timeout_ms": 20_000,
    "grpc.http2.max_pings_without_data": 0,
}
_LOST = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    flight.FlightInternalError,
    OSError,
)


class StateClient:
    """Calls the state server of one executor. One instance a process; see `client_of`.

    Attributes
    ----------
    launch : ServerLaunch

    Notes
    -----
    Threads: any.
    """

    def __init__(self, executor_directory: Path) -> None:
        self._socket = server_files.socket_path(executor_directory)
        self.launch = ServerLaunch(executor_directory)
        self._flight: flight.FlightClient | None = None
        self._timed_out_ms: int | None = None

    def call(self, action: str, body: bytes = b"", timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> Any:
        """Return the server's JSON answer to an action.

        Raises
        ------
        ServerLostError
            No server listens, or it did not answer in time.
        HoldfastError
            The error that the server raised, of the same class.
        """
        try:
            with self.mapped_errors():
                options = flight.FlightCallOptions(timeout=timeout_seconds)
                answers = list(self.connection().do_action(flight.Action(action, body), options))
        except ServerLostError as exc:
            if action in _ANSWERED_AT_ONCE and isinstance(exc.__cause__, flight.FlightTimedOutError):
                self._timed_out_ms = clock.monotonic_ms()
            raise
        return json.loads(answers[0].body.to_pybytes()) if answers else None

    def connection(self) -> flight.FlightClient:
        """Return the connection; open it if necessary."""
        if self._flight is None:
            if not self._socket.exists():
                raise ServerLostError("no state server listens", socket=str(self._socket))
            self._flight = flight.FlightClient(f"grpc+unix://{self._socket}", generic_options=[*_CHANNEL.items()])
        return self._flight

    @contextmanager
    def mapped_errors(self) -> Iterator[None]:
        """Raise a call's errors as ours, and drop the connection if it broke."""
        try:
            yield
        except (flight.FlightError, pa.ArrowException, OSError) as exc:
            raise self._mapped(exc) from exc

    def _mapped(self, exc: Exception) -> HoldfastError:
        answered = decode_error(getattr(exc, "extra_info", None) or b"")
        if answered is not None:
            return answered
        log = str(self.launch.log_path)
        if not isinstance(exc, _LOST):
            return HoldfastError("the state server failed; see its log", log=log, error=str(exc)[:200])
        self.close()
        return ServerLostError("the state server did not answer; see its log", log=log, error=type(exc).__name__)

    @property
    def has_just_timed_out(self) -> bool:
        """Whether the server has just failed to answer a quick call in time: the next one would wait in vain."""
        return self._timed_out_ms is not None and clock.monotonic_ms() - self._timed_out_ms < START_AGAIN_AFTER_MS

    def require_server(self, within_seconds: float = START_WITHIN_SECONDS) -> None:
        """Wait until a server answers; start one if none runs.

        Raises
        ------
        UnavailableError
            None answers in time; says where its log is, and shows the end.
        """
        self.launch.wait_for(lambda: self.call("ping"), within_seconds)

    def start_server(self) -> None:
        """Start a server unless one runs, or this process started one a moment ago.

        Raises
        ------
        HoldfastError
            No process can be started, or its log cannot be written.
        """
        self.launch.start_unless_just_started()

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        connection, self._flight = self._flight, None
        if connection is not None:
            connection.close()


@kept_per_process()
def client_of(executor_directory: Path) -> StateClient:
    """Return this process's client of an executor's state server."""
    return StateClient(executor_directory)
