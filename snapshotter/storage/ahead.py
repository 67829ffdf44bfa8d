"""Requests ahead of their use: while a caller is busy with one result, the next ones are on their way.

::

    items      1    2    3    4    5    6    7
               │    └────┴────┴────┘    not begun
               │    at work, or done and waiting: fewer than `window`
               with the caller

What is read is fetched and decoded ahead; what is written is encoded and stored behind.
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
    """Yield the work's result for each item, in order, with at most `window` under way or waiting for the caller.

    The work must not wait for the executor. Close the iterator if it is not read to the end: then no work is under way.
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
