"""Programs on this machine that serve on ports of the loopback: started, found ready, killed, started again."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody uses now; all are different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Program:
    """One process of a server; its output goes to a log."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path) -> None:
        self.log = log
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment), cwd=folder
            )

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does; also when it is stopped, or has ended."""
        self._process.kill()
        self._process.wait(30)

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def wait(self, limit_s: float) -> int:
        """Wait until it has ended by itself; returns its exit code."""
        return self._process.wait(limit_s)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise AssertionError with the end of its log if it has ended."""
        code = self._process.poll()
        assert code is None, f"ended with {code}: {self.log.read_text()[-2000:]}"


def answer_of(url: str) -> bytes | None:
    """Return what a server on this machine answers to a GET; None where it does not, or not in time."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2) as answer:
            return bytes(answer.read())
    except (http.client.HTTPException, OSError):
        return None


def wait_until(ready: Callable[[], bool], programs: Callable[[], Sequence[Program]], limit_s: float = 120) -> None:
    """Return when `ready` says so; raise when a program has ended, or the time has gone by."""
    end_s = time.monotonic() + limit_s
    while not ready():
        for program in programs():
            program.check()
        assert time.monotonic() < end_s, f"not ready after {limit_s} s: {[str(p.log) for p in programs()]}"
        time.sleep(0.05)
