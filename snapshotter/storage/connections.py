"""A storage's connection: one per process, made on first use.

PySpark's daemon forks its workers. A child never uses, closes or collects an inherited connection: that would remove
the parent's sockets from the epoll set that both share, or wait for threads that did not survive the fork.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Generic, TypeVar

_Connection = TypeVar("_Connection")


class Connections(Generic[_Connection]):
    """One storage's connection in each process; a `connect` that refers to the storage keeps the storage alive."""

    def __init__(
        self, connect: Callable[[], _Connection], close: Callable[[_Connection], object] = lambda _connection: None
    ) -> None:
        self._connect, self._close = connect, close
        self._by_process: dict[int, _Connection] = {}

    def of_this_process(self) -> _Connection:
        connection = self._by_process.get(os.getpid())
        if connection is None:
            connection = self._by_process.setdefault(os.getpid(), self._connect())
        return connection

    def forget(self) -> None:
        """Forget the connection, which may be dead; current users keep it, the next use makes a new one."""
        self._by_process.pop(os.getpid(), None)

    def release(self) -> None:
        """Close this process's connection; keep inherited connections open."""
        for process in list(self._by_process):
            connection = self._by_process.pop(process, None)
            if connection is None:
                continue  # another thread has just released it
            if process == os.getpid():
                self._close(connection)
            else:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
