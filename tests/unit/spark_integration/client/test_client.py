"""What a worker concludes from silent state servers, and which ones are asked for the last micro-batches."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow.flight as flight
import pytest

from holdfast.errors import UnavailableError
from holdfast.spark_integration.client import connection
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.executor import local_dirs


class Slow(flight.FlightServerBase):
    """Answers some actions at once, and others when it is told to."""

    def __init__(self, socket: Path) -> None:
        self.answering = threading.Event()
        self.prompt: set[str] = set()
        super().__init__(f"grpc+unix://{socket}")

    def do_action(self, context: object, action: flight.Action) -> Iterator[bytes]:
        if action.type not in self.prompt:
            self.answering.wait(10)
        return iter([b"null"])


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    with Slow(local_dirs.socket_path(tmp_path)) as server:
        yield server
        server.answering.set()


@pytest.fixture
def client(slow: Slow, tmp_path: Path) -> Iterator[StateClient]:
    made = StateClient(tmp_path)
    yield made
    made.close()


@pytest.mark.slow(0.5)
@pytest.mark.parametrize(("action", "hangs"), [("ping", True), ("committed", True), ("snapshot", False)])
def test_only_what_is_answered_at_once_tells_that_a_server_hangs(client: StateClient, action: str, hangs: bool) -> None:
    """A slow storage makes a snapshot slow: commits must be announced meanwhile, or no chain of theirs gets shorter."""
    with pytest.raises(UnavailableError):
        client.call(action, timeout_seconds=0.3)
    assert client.has_just_timed_out is hangs


def test_executors_are_asked_whatever_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks cannot know how much of the shared memory was free when an executor began."""
    monkeypatch.setattr(local_dirs, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "disk"))
    (tmp_path / "shm").mkdir()
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    asked: list[Path] = []

    def ask(directory: Path, timeout_seconds: float) -> list[object]:
        asked.append(directory)
        return []

    monkeypatch.setattr(connection, "_recent_of", ask)
    executors = {tmp_path / root / local_dirs.user_name() / f"executor-{root}" for root in ("disk", "shm")}
    for executor in executors:
        executor.mkdir(parents=True)
    assert connection.recent_batches() == []
    assert set(asked) == executors
    assert len(asked) == 2
