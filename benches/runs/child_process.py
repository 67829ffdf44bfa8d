"""The process of one run, and its end: nothing that a run has started outlives it, nor the command that wanted the run.

::

    holdfast bench ──▶ child ──▶ JVM, workers, state servers
          └─ lifeline ──┘        what is orphaned below the child is adopted by it

The child's standard input is its lifeline. It carries the order, one line, and stays open while the run is wanted: when
it closes, since the command stops or was killed, the child ends all that is below it, removes what the run has put on
disk and in RAM, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psutil

_ENDS_ITSELF_S = 10.0
_LOOK_EVERY_S = 0.05
_ORPHANED = 3
_SHOWN_LINES = 40


@dataclass(frozen=True)
class Ended:
    """How a run's process ended.

    Attributes
    ----------
    exit_status : int or None
        None where it was ended because it took longer than allowed.
    log : str
        The end of what it wrote.
    """

    exit_status: int | None
    log: str


def run_child(
    order: Mapping[str, Any],
    more_environment: Mapping[str, str] = MappingProxyType({}),
    limit_s: float | None = None,
    program: str = "holdfast.benches.runs.child",
) -> Ended:
    """Carry out an order in a fresh process.

    Parameters
    ----------
    more_environment : mapping of str to str
        Variables beside those of this process; the child imports from where this one does.
    limit_s : float, optional
        After which it is ended.
    program : str
        The module to run, which reads the order by `order_of_lifeline`.
    """
    python_path = os.pathsep.join(folder for folder in sys.path if folder)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", program],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": python_path, **more_environment},
            start_new_session=True,  # Ctrl-C is for the command, which ends its runs
        )
        lifeline = process.stdin
        assert lifeline is not None
        exit_status = None
        try:
            with contextlib.suppress(BrokenPipeError):  # the exit status and the log say more
                lifeline.write(json.dumps(order).encode() + b"\n")
                lifeline.flush()
            exit_status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(BrokenPipeError):
                lifeline.close()
            _end(process)
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
        return Ended(exit_status, "\n".join(lines[-_SHOWN_LINES:]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Return when a process whose lifeline is closed has ended, and all below it."""
    try:
        process.wait(_ENDS_ITSELF_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(process.pid)
            child.suspend()  # so that it starts nothing more
            end_below(child)
        process.kill()
        process.wait()


def end_below(process: psutil.Process, within_s: float = _ENDS_ITSELF_S) -> None:
    """Kill all processes below one, which adopts what they leave behind: again, until there are none."""
    end_s = time.monotonic() + within_s
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


def order_of_lifeline(lifeline: int) -> dict[str, Any]:
    """Return the order that stands on the lifeline's first line; what the child reads."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(lifeline, 1)  # not one more: the rest of the lifeline is for `end_with_lifeline`
        if not byte:
            sys.exit("nobody wants this run")
        line += byte
    order: dict[str, Any] = json.loads(line)
    return order


def end_with_lifeline(lifeline: int, folders: Sequence[str]) -> None:
    """Let this process end when its lifeline closes, with all that is below it and these folders."""

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        end_below(psutil.Process())
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
