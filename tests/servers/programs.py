"""Programs on this machine that serve on ports of the loopback: started, found ready, killed, started again."""

from __future__ import annotations

import http.client
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_FIRST_PORT = 10_000


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody uses now; all are different.

    They lie below those that the system gives to connections: one of these might take the port of a server that is down
    for a moment, and the server could not start again.
    """
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(_FIRST_PORT, max(_first_of_connections(), 2 * _FIRST_PORT))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)


def _first_of_connections() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # another system than Linux
        return 32_768


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
