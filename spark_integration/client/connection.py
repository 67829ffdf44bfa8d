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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.flight as flight

from holdfast import clock
from holdfast.backends.base import Pointer
from holdfast.errors import HoldfastError, UnavailableError
from holdfast.spark_integration.client.messages import (
    Committed,
    Message,
    ServerLostError,
    decode,
    decode_error,
    encode,
)
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.executor.processes import executor_process
from holdfast.spark_integration.shard.task import storage_options

if TYPE_CHECKING:
    from holdfast.spark_integration.shard.operator import Operator
    from holdfast.spark_integration.shard.store import ShardStore

CALL_TIMEOUT_SECONDS = 5.0
ANNOUNCE_TIMEOUT_SECONDS = 2.0
#: How long a micro-batch waits for a snapshot where the chain of commits is too long.
SNAPSHOT_TIMEOUT_SECONDS = 30.0
START_WITHIN_SECONDS = 60.0
START_TRIES = 3
START_AGAIN_AFTER_MS = 10_000
_LOOK_EVERY_MS = 20
_LOG_LINES_SHOWN = 15
# An error comes in the trailer of a call, which gRPC otherwise limits to 8 KB; a channel of its own per client, since
# channels to one address would share the pause that gRPC makes after a failed connection.
_CHANNEL = [("grpc.max_metadata_size", 1 << 20), ("grpc.use_local_subchannel_pool", 1)]
# What the server has freed goes back to the system, since a budget is one of the process. Two shards of 600,000 keys
# that take commits of 100,000, budget 384 MiB, two runs each: peak 280 and 283 MiB, 422 and 433 with two malloc arenas
# and nothing else, with the same CPU time. What the user's environment says goes first.
_SERVER_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}
_LOST = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    flight.FlightInternalError,
    OSError,
)

_log = logging.getLogger(__name__)


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
        with self.mapped_errors():
            options = flight.FlightCallOptions(timeout=timeout_seconds)
            answers = list(self.connection().do_action(flight.Action(action, body), options))
        return json.loads(answers[0].body.to_pybytes()) if answers else None

    def connection(self) -> flight.FlightClient:
        """Return the connection, opened where there is none."""
        if self._flight is None:
            if not self._socket.exists():
                raise ServerLostError("no state server listens", socket=str(self._socket))
            self._flight = flight.FlightClient(f"grpc+unix://{self._socket}", generic_options=_CHANNEL)
        return self._flight

    @contextmanager
    def mapped_errors(self) -> Iterator[None]:
        """Raise the errors of a call as ours, and forget the connection when it broke."""
        try:
            yield
        except (flight.FlightError, pa.ArrowException, OSError) as exc:
            raise self._mapped(exc) from exc

    def _mapped(self, exc: Exception) -> HoldfastError:
        answered = decode_error(getattr(exc, "extra_info", None) or b"")
        if answered is not None:
            return answered
        log = str(local_dirs.log_path(self._directory))
        if not isinstance(exc, _LOST):
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
        failed = 0
        while True:
            try:
                return self.call("ping")
            except ServerLostError as exc:
                if failed >= START_TRIES or clock.monotonic_ms() > end_ms:
                    raise UnavailableError(
                        "the state server does not start, and this backend needs it; its log ends with: "
                        + (self._end_of_log() or "nothing"),
                        log=str(local_dirs.log_path(self._directory)),
                    ) from exc
            if self._started is not None and self._started.poll() is not None:
                failed += self._started.returncode != 0
                self._started = None
            if self._started is None:
                self._start()
            clock.sleep_ms(_LOOK_EVERY_MS)

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
        HoldfastError
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
        self._started_ms = clock.monotonic_ms()
        configuration = {
            "executor_directory": str(self._directory),
            "executor": str(executor_process()),
            "socket": str(self._socket),
        }
        try:
            self._started = self._server_process(lock)
            assert self._started.stdin is not None
            with suppress(BrokenPipeError), self._started.stdin as stdin:  # it ended at once: its log says why
                stdin.write(json.dumps(configuration).encode())
        except OSError as exc:
            raise UnavailableError(f"no state server can be started: {exc}", python=sys.executable) from exc
        finally:
            os.close(lock)  # the new process has it, so it goes with that

    def _server_process(self, lock: int) -> subprocess.Popen[bytes]:
        environment = {**_SERVER_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        local_dirs.make_log_directory()
        with open(local_dirs.log_path(self._directory), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "holdfast.spark_integration.server.state_server"],
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


class Exchange:
    """One exchange with the state server; as a context manager it ends with the context.

    Parameters
    ----------
    client : StateClient
    message : mapping
        Says what is asked; JSON values.
    timeout_seconds : float or None
        For the whole exchange; None for one that lives as long as what it stands for.

    Notes
    -----
    Every method raises what `StateClient.call` does. Threads: one at a time.
    """

    def __init__(self, client: StateClient, message: Message, timeout_seconds: float | None) -> None:
        self._client = client
        with client.mapped_errors():
            options = flight.FlightCallOptions(timeout=timeout_seconds)
            asked = flight.FlightDescriptor.for_command(encode(message))
            self._writer, self._reader = client.connection().do_exchange(asked, options)

    def send(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
        """Send batches of one schema, and nothing after them."""
        with self._client.mapped_errors():
            self._writer.begin(schema)
            for batch in batches:
                self._writer.write_batch(batch)
        self.end()

    def ask(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Send batches of one schema; after each, yield what the server answers, until that has as many rows."""
        with self._client.mapped_errors():
            self._writer.begin(schema)
        answers = self.receive()
        for batch in batches:
            with self._client.mapped_errors():
                self._writer.write_batch(batch)
            missing = batch.num_rows
            while missing > 0:
                answer = next(answers, None)
                if answer is None:
                    raise ServerLostError("the state server ended before it had answered")
                missing -= answer.num_rows
                yield answer
        self.end()

    def end(self) -> None:
        """Say that nothing more is sent."""
        with self._client.mapped_errors():
            self._writer.done_writing()

    def receive(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches that the server sends, until it has no more."""
        while True:
            try:
                with self._client.mapped_errors():
                    chunk = self._reader.read_chunk()
            except StopIteration:
                return
            yield chunk.data

    def answer(self) -> Message:
        """Return the message that the server sends."""
        with self._client.mapped_errors():
            return decode(self._reader.read_chunk().app_metadata.to_pybytes())

    def close(self) -> None:
        """End the exchange; what the server has not sent yet it does not send any more."""
        for end in (self._reader.cancel, self._writer.close):
            with suppress(flight.FlightError, pa.ArrowException, OSError):  # it has been ended, or has broken
                end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_clients: dict[tuple[int, Path], StateClient] = {}


def client_of(executor_directory: Path) -> StateClient:
    """Return this process's client of an executor's state server."""
    key = (os.getpid(), executor_directory)
    if key not in _clients:
        _clients[key] = StateClient(executor_directory)
    return _clients[key]


def announcement(operator: Operator, opened: ShardStore, accepted: Pointer | None, committed: Pointer) -> Committed:
    """Return what the state server must know of a commit."""
    settings = operator.settings
    return Committed(
        shard=opened.shard,
        accepted=accepted,
        committed=committed,
        prefix=opened.prefix,
        checkpoint_dir=settings.checkpoint_dir,
        storage_options=storage_options(settings),
        policy=opened.policy,
        retained_versions=opened.retained_versions,
        upload_bandwidth_bytes=settings.upload_bandwidth_bytes,
    )


def announce(operator: Operator, opened: ShardStore, *, accepted: Pointer | None, committed: Pointer) -> bool:
    """Tell the state server of a commit, and start one where none answers.

    Returns
    -------
    bool
        Whether a server took note.
    """
    client = client_of(opened.executor_directory)
    message = announcement(operator, opened, accepted, committed)
    if client.has_just_timed_out:
        return False
    try:
        client.call("committed", message.encode(), ANNOUNCE_TIMEOUT_SECONDS)
    except HoldfastError as exc:
        _log.info("%s", exc)
        _start_server(client)
        return False
    return True


def snapshot_now(operator: Operator, opened: ShardStore, accepted: Pointer) -> None:
    """Have the state server snapshot a version, and wait for it.

    Raises
    ------
    HoldfastError
        There is no server, or it could not do so in time; the message says why.
    """
    client = client_of(opened.executor_directory)
    client.require_server()
    message = announcement(operator, opened, accepted, accepted)
    client.call("snapshot", message.encode(), SNAPSHOT_TIMEOUT_SECONDS)


def _start_server(client: StateClient) -> None:
    try:
        client.start_server()
    except HoldfastError as exc:
        _log.warning("no state server can be started; it is tried again later: %s", exc)
