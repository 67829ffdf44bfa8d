"""Takes an idle wait of some 40 ms off each Python stage of a micro-batch.

Spark's JVM writes to a Python worker in several small pieces over a loopback TCP connection. Nagle's
algorithm holds the second piece back until the first is acknowledged, and the worker's kernel delays that
acknowledgement, since nothing goes the other way. A worker that asks for immediate acknowledgements ends
the wait; the kernel forgets the wish after a while, so it is repeated before each read.

``spark.python.unix.domain.socket.enabled`` (Spark 4.1 and later) does the same by doing without TCP; then there is
nothing to do here. See docs/decisions/0008-fixed-cost.md for the figures.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import TypeVar

_Item = TypeVar("_Item")
_DESCRIPTORS = "/proc/self/fd"


def read_promptly(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield what Spark sends to this worker, and acknowledge it at once while doing so."""
    acknowledge_at_once()
    for item in items:
        acknowledge_at_once()
        yield item


def acknowledge_at_once() -> None:
    """Ask the kernel to acknowledge what arrives on this worker's TCP connections without delay."""
    for descriptor in _tcp_descriptors(os.getpid()):
        # The option is set on the connection, so it reaches the worker's own object for it.
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


@lru_cache(maxsize=1)
def _tcp_descriptors(_pid: int) -> list[int]:
    """Return this process's loopback TCP connections; none on systems without Linux's ways."""
    if not (hasattr(socket, "TCP_QUICKACK") and os.path.isdir(_DESCRIPTORS)):
        return []
    found = []
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            if os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family == socket.AF_INET and connection.getpeername()[0] == "127.0.0.1":
                        found.append(int(name))
    return found
