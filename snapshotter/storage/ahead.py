"""Prefetching: the next results are produced while the caller processes one.

::

    items      1    2    3    4    5    6    7
               │    └────┴────┴────┘    not started
               │    running, or done and waiting: fewer than `window`
               with the caller

Reads are fetched and decoded ahead of the caller; writes are encoded and stored behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def ahead(
    executor: Executor, work: Callable[[_Item], _Result], items: Iterable[_Item], window: int = 4
) -> Generator[_Result, None, None]:
    """Yield the result of `work` for each item, in order, with at most `window` results running or waiting.

    `work` must not wait for the executor. Close an iterator that is not exhausted, to stop the remaining work.
    """
    under_way: deque[Future[_Result]] = deque()
    try:
        for item in items:
            under_way.append(executor.submit(work, item))
            if len(under_way) >= window:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
        wait(under_way)
