"""A function called in a process of its own, and its end: nothing that it started outlives it, nor who wanted it.

::

    holdfast bench ──▶ child ──▶ JVM, workers, state servers
          └─ lifeline ──┘        what is orphaned below the child is adopted by it

A fresh process means a fresh JVM, fresh Python workers and no state from an earlier run. The child's standard input is
its lifeline. It carries the order, one line, and stays open while the call is wanted: when it closes, since the command
stops or was killed, the child ends all that is below it, removes what the call has put on disk and in RAM, and ends.
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
    """A run of an engine failed."""


def call_in_child(
    what: str, function: str, *arguments: Any, folders: Sequence[Path] = (), limit_s: float | None = None
) -> Any:
    """Call ``module:name`` in a fresh process; arguments and result are JSON values.

    Raises `BenchError`, with the end of the log, if it fails or takes longer than `limit_s`; then removes `folders`.
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
            start_new_session=True,  # Ctrl-C is for the command, which ends its runs
        )
        exit_status = _wait(process, json.dumps(order).encode() + b"\n", limit_s)
        if exit_status == 0:
            return json.loads(result.read_text())
        log.seek(0)
        shown = "\n".join(log.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:])
        if exit_status is None:
            raise BenchError(f"{what} took longer than allowed and was ended:\n{shown}", limit_s=limit_s)
        raise BenchError(f"{what} failed:\n{shown}", exit_status=exit_status)


def _wait(process: subprocess.Popen[bytes], order: bytes, limit_s: float | None) -> int | None:
    """Return the exit status of a child, once it and all below it have ended; None if it took too long."""
    lifeline = process.stdin
    assert lifeline is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # the exit status and the log say more
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
    """Return when a process whose lifeline is closed has ended, and all below it."""
    try:
        process.wait(_ENDS_ITSELF_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(process.pid)
            child.suspend()  # so that it starts nothing more
            _end_below(child)
        process.kill()
        process.wait()


def _end_below(process: psutil.Process) -> None:
    """Kill all processes below one, which adopts what they leave behind: again, until there are none."""
    end_s = time.monotonic() + _ENDS_ITSELF_S
    while time.monotonic() < end_s:
        below = [one for one in process.children(recursive=True) if _is_alive(one)]
        if not below:
            return
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        time.sleep(_LOOK_EVERY_S)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _order_of_lifeline(lifeline: int) -> dict[str, Any]:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(lifeline, 1)  # not one more: the rest of the lifeline is for `_end_with_lifeline`
        if not byte:
            sys.exit("nobody wants this run")
        line += byte
    order: dict[str, Any] = json.loads(line)
    return order


def _end_with_lifeline(lifeline: int, folders: Sequence[str]) -> None:
    """Let this process end when its lifeline closes, with all that is below it and these folders."""

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        _end_below(psutil.Process())
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def carry_out(order: Mapping[str, Any]) -> None:
    """Call what an order names, and store what it returns."""
    module, _, name = order["function"].partition(":")
    result = getattr(importlib.import_module(module), name)(*order["arguments"])
    Path(order["result"]).write_text(json.dumps(result))


def main() -> None:
    """Carry out the order on standard input."""
    lifeline = sys.stdin.fileno()
    order = _order_of_lifeline(lifeline)
    adopt_orphans()
    _end_with_lifeline(lifeline, order["folders"])
    try:
        carry_out(order)
    finally:
        _end_below(psutil.Process())


if __name__ == "__main__":
    main()
