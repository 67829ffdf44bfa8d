"""Calls in processes of their own: of functions, and of programs in a new interpreter.

A new interpreter takes three seconds of CPU time until it has imported the libraries. So processes that call functions
are forked from one that has; it is started by the first call of a test process.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

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


def run_python(*arguments: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, from which nothing is imported but what this process can import; wait for its end."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables, cwd=folder, check=False)
