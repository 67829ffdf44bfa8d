"""A storage's connection: one per process, made on first use.

PySpark's daemon forks its workers. An inherited connection is never used, closed or collected in a child: that would
take the parent's sockets out of the epoll set both share, or wait for threads that did not survive the fork.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Generic, TypeVar

_Connection = TypeVar("_Connection")


class Connections(Generic[_Connection]):
    """The connections of one storage, one a process; `connect` must not refer to it, or it is never released."""

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

    def leave(self) -> None:
        """Abandon the connection, which may be dead, to its present users; the next use makes another."""
        self._by_process.pop(os.getpid(), None)

    def release(self) -> None:
        """Close the connection of this process; keep inherited ones open."""
        for process in list(self._by_process):
            connection = self._by_process.pop(process, None)
            if connection is None:
                continue  # another thread has just released it
            if process == os.getpid():
                self._close(connection)
            else:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
