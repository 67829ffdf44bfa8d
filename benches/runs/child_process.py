"""Calls a function in a fresh child process, and ends everything that the call started.

::

    holdfast bench ──▶ child ──▶ JVM, workers, state servers
          └─ lifeline ──┘        the child adopts orphaned descendants

A fresh process has a fresh JVM, fresh Python workers and no state from an earlier run. The child's standard input is
its lifeline. It carries the order, one line, and stays open while the caller waits. When it closes because the command
stops or was killed, the child kills its descendants, removes the call's files from disk and RAM, and exits.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from holdfast.benches.instruments.measured import adopt_orphans
from holdfast.errors import HoldfastError

_ENDS_ITSELF_S = 10.0
_LOOK_EVERY_S = 0.05
_ORPHANED = 3
_SHOWN_LINES = 40


class BenchError(HoldfastError):
    """A run of an engine failed, or its engines disagree."""


def call_in_child(
    what: str, function: str, *arguments: Any, folders: Sequence[Path] = (), limit_s: float | None = None
) -> Any:
    """Call ``module:name`` in a fresh process; arguments and result are JSON values.

    Raises `BenchError`, with the end of the log, if the call fails or takes longer than `limit_s`. A child that loses
    its lifeline removes `folders`.
    """
    python_path = os.pathsep.join(folder for folder in sys.path if folder)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True) as own,
        tempfile.TemporaryFile() as log,
    ):
        result = Path(own, "result.json")
        order = {"function": function, "arguments": arguments, "result": str(result)}
        order["folders"] = [own, *map(str, folders)]
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": python_path},
            start_new_session=True,  # Ctrl-C reaches the command alone, which ends its runs
        )
        exit_status = _wait(process, json.dumps(order).encode() + b"\n", limit_s)
        if exit_status == 0:
            return json.loads(result.read_text())
        log.seek(0)
        shown = "\n".join(log.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:])
        if exit_status is None:
            raise BenchError(f"{what} exceeded its time limit and was killed:\n{shown}", limit_s=limit_s)
        raise BenchError(f"{what} failed:\n{shown}", exit_status=exit_status)


def _wait(process: subprocess.Popen[bytes], order: bytes, limit_s: float | None) -> int | None:
    """Return the child's exit status once it and its descendants have ended, or None after a timeout."""
    lifeline = process.stdin
    assert lifeline is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # the exit status and the log explain it
            lifeline.write(order)
            lifeline.flush()
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(BrokenPipeError):
            lifeline.close()
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child without a lifeline and its descendants to end; kill them if they take too long."""
    try:
        process.wait(_ENDS_ITSELF_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(process.pid)
            child.suspend()  # it must not start more processes
            _end_below(child)
        process.kill()
        process.wait()


def _end_below(process: psutil.Process) -> None:
    """Kill a process's descendants until none is left; it adopts the orphans that this creates."""
    end_s = time.monotonic() + _ENDS_ITSELF_S
    while time.monotonic() < end_s:
        below = [child for child in process.children(recursive=True) if _is_alive(child)]
        if not below:
            return
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(_LOOK_EVERY_S)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _end_with_lifeline(lifeline: int, folders: Sequence[str]) -> None:
    """When the lifeline closes, kill this process's descendants, remove the folders and exit."""

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        _end_below(psutil.Process())
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def carry_out(order: Mapping[str, Any]) -> None:
    """Call the function that an order names, and store its result."""
    module, _, name = order["function"].partition(":")
    result = getattr(importlib.import_module(module), name)(*order["arguments"])
    Path(order["result"]).write_text(json.dumps(result))


def main() -> None:
    """Carry out the order on standard input."""
    lifeline = sys.stdin.fileno()
    with open(lifeline, "rb", buffering=0, closefd=False) as unbuffered:  # takes no byte after the order
        line = unbuffered.readline()
    if not line.endswith(b"\n"):
        sys.exit("the caller ended before it gave an order")
    order = json.loads(line)
    adopt_orphans()
    _end_with_lifeline(lifeline, order["folders"])
    try:
        carry_out(order)
    finally:
        _end_below(psutil.Process())


if __name__ == "__main__":
    main()
