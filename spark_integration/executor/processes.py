"""Identifies processes, such as a Python worker's executor, and checks whether they are running."""

from __future__ import annotations

import os
import re
import select
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil
import xxhash

#: How many storages a process keeps open, each with idle connections; further storages are reopened per micro-batch.
STORAGES = 64
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
ENDS_WITHIN_SECONDS = 5.0
_PROCESS = re.compile("([0-9]{1,9})-([0-9]{1,18})")
_PYTHON_DAEMONS = ("pyspark.daemon", "pyspark.worker")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BOOTS = 10**6


def kept_per_process(
    results: int | None = None,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator that caches up to `results` results by hashable arguments; a fork starts with no results."""

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @lru_cache(maxsize=results)
        def kept(_process: int, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            return function(*args, **kwargs)

        @wraps(function)
        def of_this_process(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            return kept(os.getpid(), *args, **kwargs)  # type: ignore[arg-type]  # they are hashable

        return of_this_process

    return decorate


@dataclass(frozen=True)
class ProcessId:
    """A process, identified by its id and start time, because the system reuses ids."""

    pid: int
    #: Start time; on Linux, clock ticks since boot, which changes of the clock do not affect, and six digits that
    #: identify the boot
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process."""
        return cls(pid, _status(pid)[0])

    def is_alive(self) -> bool:
        """Return whether this process is still running; a zombie is not."""
        try:
            started, has_ended = _status(self.pid)
        except psutil.NoSuchProcess:
            return False
        return started == self.started and not has_ended

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the process has ended, up to a limit; return whether it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid) if sys.platform == "linux" else None
        except ProcessLookupError:
            return True
        except OSError:
            descriptor = None  # refused in some containers
        try:
            if not self.is_alive():
                return True
            if descriptor is None:
                psutil.Process(self.pid).wait(timeout_seconds)
                return True
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            return bool(ended.poll(None if timeout_seconds is None else timeout_seconds * 1000))
        except psutil.NoSuchProcess:
            return True
        except psutil.TimeoutExpired:
            return False
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}"

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """Parse the output of `str`; None for other text."""
        found = _PROCESS.fullmatch(text)
        parsed = cls(int(found[1]), int(found[2])) if found else None
        return parsed if str(parsed) == text else None


def _status(pid: int) -> tuple[int, bool]:
    """Return when a process started, and whether it is a zombie."""
    if sys.platform != "linux":
        process = psutil.Process(pid)
        return round(process.create_time() * 1000), process.status() == psutil.STATUS_ZOMBIE
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise psutil.NoSuchProcess(pid) from exc
    # The program's name precedes these fields and may contain anything. Source: man proc_pid_stat, fields 3 and 22.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[19]) * _BOOTS + xxhash.xxh32_intdigest(_boot(_BOOT).encode()) % _BOOTS, fields[0] in (b"Z", b"X")


@cache
def _boot(file: Path) -> str:
    """Return the system's boot id, or an empty string."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


@kept_per_process(1)
def executor_process() -> ProcessId:
    """Return the executor of this process: the parent of PySpark's daemon or, without a daemon, of this process."""
    process = psutil.Process().parent()
    while process is not None and any(name in process.cmdline() for name in _PYTHON_DAEMONS):
        process = process.parent()
    return ProcessId.of(process.pid if process else 1)


@kept_per_process(1)
def machine() -> str:
    """Return a string that is equal for processes that can see each other, and differs by container and machine."""
    host, boot = socket.gethostname(), _boot(_BOOT)
    try:
        return f"{host} {boot} {os.readlink('/proc/self/ns/pid')}" if boot else host
    except OSError:
        return host


def place_of(process: ProcessId) -> str:
    """Return a string that identifies a process on this machine; `lives` checks whether the process is running."""
    return f"{xxhash.xxh3_64_hexdigest(machine().encode())}.{process}"


def lives(place: str, within_seconds: float = ENDS_WITHIN_SECONDS) -> bool | None:
    """Wait for a process to end, given its `place_of`; return whether it still runs, or None if it is not visible."""
    process = ProcessId.parse(place.partition(".")[2])
    if process is None or place != place_of(process):
        return None
    if not process.wait(within_seconds):
        return True
    try:
        os.kill(process.pid, 0)
    except PermissionError:  # a different user's process has the id: it may be this process if the system hides it
        return None
    except ProcessLookupError:
        pass
    return False
