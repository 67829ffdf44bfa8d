"""The connections of a storage, where several threads ask for one or close it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.snapshotter.storage.connections import Connections

THREADS = 4


@pytest.fixture
def _often_interrupted() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.slow(1)
@pytest.mark.usefixtures("_often_interrupted")
def test_threads_that_close_at_once_close_each_connection_once() -> None:
    """None of them fails because another one was faster."""
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(5_000):
            closed: list[object] = []
            connections = Connections(object, closed.append)
            connection = connections.of_this_process()
            all_there = threading.Barrier(THREADS)

            def close(connections: Connections[object] = connections, all_there: threading.Barrier = all_there) -> None:
                all_there.wait()
                connections.release()

            for done in [threads.submit(close) for _ in range(THREADS)]:
                done.result(timeout=60)
            assert closed == [connection]
