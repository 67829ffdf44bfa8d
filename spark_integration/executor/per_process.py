"""Caches that a forked process does not inherit."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

#: How many storages a process keeps: of more, each is opened anew in every micro-batch. One holds idle connections.
STORAGES = 64

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def kept_per_process(
    results: int | None = None,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator that caches a function's results by their arguments, which must be hashable.

    PySpark's daemon forks its workers. Threads, connections and locks do not survive that, so a forked process calls
    the function anew.

    Parameters
    ----------
    results : int, optional
        How many to keep, the most recently used ones; all by default.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @lru_cache(maxsize=results)
        def kept(_process: int, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            return function(*args, **kwargs)

        @wraps(function)
        def of_this_process(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            return kept(os.getpid(), *args, **kwargs)  # type: ignore[arg-type]  # they are hashable

        return of_this_process

    return decorate
