"""Which process is whose: the executor that a Python worker serves, and whether it still lives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import psutil

_PYTHON_DAEMONS = ("pyspark.daemon", "pyspark.worker")


@dataclass(frozen=True)
class ProcessId:
    """A process for good: its number may be used again, its start time tells the two apart.

    Attributes
    ----------
    pid : int
    started_ms : int
        When it started, in ms since 1970.
    """

    pid: int
    started_ms: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process."""
        return cls(pid, _started_ms(psutil.Process(pid)))

    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        try:
            process = psutil.Process(self.pid)
            return _started_ms(process) == self.started_ms and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def wait(self) -> None:
        """Return when the process has ended."""
        try:
            process = psutil.Process(self.pid)
            if _started_ms(process) == self.started_ms:
                process.wait()
        except psutil.NoSuchProcess:
            return

    def __str__(self) -> str:
        return f"{self.pid}-{self.started_ms}"

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """Return what `str` wrote, or None if it did not write this."""
        pid, _, started = text.partition("-")
        return cls(int(pid), int(started)) if pid.isdigit() and started.isdigit() else None


def _started_ms(process: psutil.Process) -> int:
    return round(process.create_time() * 1000)


def executor_process() -> ProcessId:
    """Return the executor this Python process works for.

    A worker is a child of PySpark's daemon, which is a child of the executor; without the daemon it is a
    child of the executor itself. Outside Spark it is the parent process.
    """
    return _executor_of(os.getpid())


@lru_cache(maxsize=1)
def _executor_of(pid: int) -> ProcessId:
    process = psutil.Process(pid).parent()
    while process is not None and any(name in process.cmdline() for name in _PYTHON_DAEMONS):
        process = process.parent()
    return ProcessId.of(process.pid if process else 1)
