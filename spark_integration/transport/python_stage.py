"""Avoids two costs of PySpark's workers in each Python stage.

**Garbage.** PySpark's daemon runs a full garbage collection after every task. With pandas, pyarrow and fsspec loaded, a
process has about 110,000 objects, and a collection costs 30 to 55 ms of CPU. In a small micro-batch of three Python
stages that is more than all other Python work (300 ms of CPU against 40). Modules are never garbage, so they are
frozen; newer objects are collected as before. The next stage freezes later imports: otherwise, a worker that unpacks
rows before it opens its first shard on S3 would traverse that client's modules after each task, in 23 to 45 ms.

In a loop over keys, most objects are freed at once or live as long as the slab of keys, such as its rows and its state.
Repeated traversals of the latter free nothing and take up to a sixth of the loop, so `rare_full_collections` makes them
rarer. Young objects are collected as before, and the daemon's full collection still follows each task.

**Waits.** Spark's JVM writes to a Python worker in several small pieces over a loopback TCP connection. Nagle's
algorithm holds the second piece back until the first is acknowledged, and the worker's kernel delays that
acknowledgement by 40 ms, because it has no data to send with it. So a worker requests immediate acknowledgements before
each read; the kernel soon resets the option. Spark's stateful operators read their first rows before they call
holdfast, so `ImmediateAcks` requests them when it is unpickled. In the other direction, Nagle's algorithm delays the
end of an answer of more than 130 KB, so a worker turns it off. With ``spark.python.unix.domain.socket.enabled`` (Spark
4.1) there is no TCP connection, and no such wait.

Figures: docs/decisions/0017-shards-in-spark.md.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from holdfast.spark_integration.executor.processes import kept_per_process

_Item = TypeVar("_Item")
_DESCRIPTORS = "/proc/self/fd"
# How many collections of young objects precede a collection of older objects; Python's default is 10.
_YOUNG_COLLECTIONS = 100
# Per process: for the imports of its first stage, of a shard and of a storage client, and one to spare.
_FREEZES_MAX = 4


def prepared(items: Iterable[_Item]) -> Iterator[_Item]:
    """Freeze this worker's modules, then yield the items that Spark sends; acknowledge each read immediately."""
    freeze_modules()
    acknowledge_at_once()
    for item in items:
        acknowledge_at_once()
        yield item


class ImmediateAcks:
    """Requests immediate acknowledgements when it is unpickled, just before a worker reads its first rows."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        acknowledge_at_once()


def freeze_modules() -> None:
    """Exclude loaded modules from later garbage collections; a few later calls add newly loaded modules."""
    loaded, frozen = len(sys.modules), _frozen_modules()
    if len(frozen) < _FREEZES_MAX and loaded > max(frozen, default=0):
        frozen.append(loaded)
        # Collect first: garbage would be frozen too, and never freed.
        gc.collect()
        gc.freeze()


@kept_per_process(1)
def _frozen_modules() -> list[int]:
    """Return the number of modules at each freeze in this process."""
    return []


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Collect old objects less often inside the ``with`` block; overlapping blocks may end in any order."""
    before = gc.get_threshold()
    if before[1] >= _YOUNG_COLLECTIONS:
        yield
        return
    inside = (before[0], _YOUNG_COLLECTIONS, before[2])
    gc.set_threshold(*inside)
    try:
        yield
    finally:
        if gc.get_threshold() == inside:
            gc.set_threshold(*before)


def acknowledge_at_once() -> None:
    """Ask the kernel to acknowledge data on this worker's TCP connections without delay."""
    for descriptor in _tcp_descriptors():
        # The option belongs to the connection, so it also applies to the worker's own socket object.
        with suppress(OSError), _socket_of(descriptor) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


@kept_per_process(1)
def _tcp_descriptors() -> list[int]:
    """Return this process's loopback TCP connections, with Nagle's algorithm off; empty except on Linux."""
    if not (hasattr(socket, "TCP_QUICKACK") and os.path.isdir(_DESCRIPTORS)):
        return []
    found = []
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            if os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                with _socket_of(int(name)) as connection:
                    if connection.family == socket.AF_INET and connection.getpeername()[0] == "127.0.0.1":
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        found.append(int(name))
    return found


def _socket_of(descriptor: int) -> socket.socket:
    """Return a new socket for a descriptor's connection; raises `OSError` if the connection is gone."""
    own = os.dup(descriptor)
    try:
        is_blocking = os.get_blocking(own)
        found = socket.socket(fileno=own)
    except OSError:
        os.close(own)  # Python leaves it open
        raise
    os.set_blocking(own, is_blocking)  # with a default timeout, the constructor has changed the shared connection
    return found
