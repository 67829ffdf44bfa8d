"""Calls functions in processes of their own, which are forked from one that has imported the libraries.

A new interpreter takes three seconds of CPU time until it has; this one is started by the first call of a test process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pandas", "pytest", "hypothesis", "holdfast.mvcc", "holdfast.testing", "holdfast.backends.rocksdb.backend"]
)


def run_elsewhere(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a call of a module's function in another process."""
    process = _context.Process(target=function, args=arguments)
    process.start()
    return process


def finish(process: BaseProcess) -> None:
    """Wait for the end of a call, which must be a good one; otherwise its traceback is in the captured output."""
    process.join()
    assert process.exitcode == 0
