"""A process that stands for an executor, and the clients that its workers have."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UnavailableError
from holdfast.spark_integration.client import connection
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.executor.processes import ProcessId
from tests.ram import place_in_ram

PATIENCE_SECONDS = 30.0


class Executor:
    """A process that waits, its directory, and a client as one of its workers has it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.id = ProcessId.of(self.process.pid)
        self.directory = local_dirs.executor_directory(root, self.id)
        self.clients: list[StateClient] = []

    def client(self) -> StateClient:
        self.clients.append(StateClient(self.directory))
        return self.clients[-1]

    def start(self, client: StateClient) -> dict[str, Any]:
        """Start a server and return its statistics when it answers."""
        client.start_server()
        statistics: dict[str, Any] = eventually(lambda: client.call("statistics"))
        return statistics

    @property
    def log(self) -> str:
        return local_dirs.log_path(self.directory).read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        for client in self.clients:
            client.close()
            if client.process is not None:
                client.process.kill()
                client.process.wait()


def eventually(is_so: Callable[[], Any]) -> Any:
    """Return the first true answer; fail when there is none in time."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        with suppress(UnavailableError):
            if answer := is_so():
                return answer
        time.sleep(0.02)
    pytest.fail("it did not come true in time")


StartExecutor = Callable[..., Executor]


@contextmanager
def started_executors() -> Iterator[StartExecutor]:
    """Give a function that starts executors, by default all below one root in a temporary directory of their own."""
    # A short path: sockets have no room for a long one.
    temporary = tempfile.mkdtemp(prefix="hf-", dir=place_in_ram() or "/tmp")
    started: list[Executor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", temporary)
        patch.setenv("TMPDIR", temporary)

        def start(root: Path | None = None) -> Executor:
            executor = Executor(root or Path(temporary) / "root")
            started.append(executor)
            patch.setattr(connection, "executor_process", lambda: executor.id)
            return executor

        try:
            yield start
        finally:
            for executor in started:
                executor.close()
            shutil.rmtree(temporary)
