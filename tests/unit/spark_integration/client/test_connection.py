"""What a worker concludes from calls that its state server does not answer in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow.flight as flight
import pytest

from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.messages import ServerLostError
from holdfast.spark_integration.executor import server_files


class Slow(flight.FlightServerBase):
    """Answers when it is told to."""

    def __init__(self, socket: Path) -> None:
        self.answering = threading.Event()
        super().__init__(f"grpc+unix://{socket}")

    def do_action(self, context: object, action: flight.Action) -> Iterator[bytes]:
        self.answering.wait(10)
        return iter([b"null"])


@pytest.fixture
def executor_directory(tmp_path: Path) -> Iterator[Path]:
    with Slow(server_files.socket_path(tmp_path)) as server:
        yield tmp_path
        server.answering.set()


@pytest.mark.parametrize(("action", "hangs"), [("ping", True), ("committed", True), ("snapshot", False)])
def test_only_what_is_answered_at_once_tells_that_a_server_hangs(
    executor_directory: Path, action: str, hangs: bool
) -> None:
    """A slow storage makes a snapshot slow: commits must be announced meanwhile, or no chain of theirs gets shorter."""
    client = StateClient(executor_directory)
    with pytest.raises(ServerLostError):
        client.call(action, timeout_seconds=0.3)
    assert client.has_just_timed_out is hangs
    client.close()
