"""One run of a peer's program: started in the peer's environment, watched through its standard output."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from holdfast.benches.peers import input_files
from holdfast.benches.peers.environments import Environment
from holdfast.benches.peers.job import FromFiles
from holdfast.benches.peers.progress import Progress
from holdfast.errors import UnavailableError

_PROGRAMS = Path(__file__).parent / "programs"
_LOOK_EVERY_S = 0.5
_END_WITHIN_S = 120.0
_SILENT_S = 300.0
_LOG_LINES = 40
_PIPE_BYTES = 1 << 20


@dataclass(frozen=True)
class Program:
    """A peer's program, and how it is told to run.

    `options` are what the script knows beyond the common part of an order. A program that does not end by itself waits
    for further files, and is ended. One that does not work in pieces has no micro-batches: only the time of all rows
    says something.
    """

    environment: Environment
    script: str
    options: Mapping[str, Any]
    ends: bool = True
    in_pieces: bool = True

    def command(self, order: Path) -> list[str]:
        """Return how to start it."""
        return [str(self.environment.python), str(_PROGRAMS / self.script), str(order)]


def order_of(job: FromFiles, folder: Path, *, every: int, durable: Path | None) -> dict[str, Any]:
    """Return the common part of an order: print the results of each key that `every` divides, and survive if durable.

    `folder` is for all that the program writes, `durable` for what lets it survive a kill.
    """
    return {
        "rows": str(job.folder()),
        "batches": [[str(path) for path in files] for files in input_files.batches_of(job.folder())],
        "parallelism": job.slots,
        "memory_mb": job.memory_mb,
        "commit_ms": job.commit_ms,
        "commit_rows": job.rows,
        "every": every,
        "local": str(folder / "local"),
        "durable": None if durable is None else str(durable),
    }


class PeerRun:
    """A running program, from its start to its end.

    Its order, its log (what it prints besides results) and what it writes itself are in the folder; `progress` takes
    its results, and `look` is called about twice a second.
    """

    def __init__(
        self, program: Program, order: dict[str, Any], folder: Path, progress: Progress, look: Callable[[], None]
    ) -> None:
        self._program = program
        self._log = folder / "log"
        self._progress = progress
        self._look = look
        folder.mkdir(parents=True, exist_ok=True)
        Path(order["local"]).mkdir(exist_ok=True)
        file = folder / "order.json"
        file.write_text(json.dumps({**order, **program.options}))
        self.started_s = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                program.command(file),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": ""},
                start_new_session=True,
            )
        self._lines = self._read_lines()

    def until(self, enough: Callable[[], bool]) -> None:
        """Follow the program until `enough`, or to its end; one that fails or is silent for minutes is an error."""
        with self._log.open("ab") as log:
            for line in self._lines:
                if not self._progress.take(line, time.monotonic()):
                    log.write(line)
                if enough():
                    return
        self._require(self._ended() == 0, "failed, or did not end")

    def _read_lines(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        pipe, rest = self._process.stdout.fileno(), b""
        looked_s = heard_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                if selector.select(_LOOK_EVERY_S):
                    heard_s, found = time.monotonic(), os.read(pipe, _PIPE_BYTES)
                    if not found:
                        return
                    *lines, rest = (rest + found).split(b"\n")
                    yield from (line + b"\n" for line in lines)
                now_s = time.monotonic()
                self._require(now_s - heard_s < _SILENT_S, "has printed no result for minutes")
                if now_s - looked_s >= _LOOK_EVERY_S:
                    self._look()
                    looked_s = now_s

    def finish(self) -> None:
        """Wait for the end of a program that ends by itself; end any other one."""
        if self._program.ends:
            self.until(lambda: False)
        self.kill()

    def kill(self) -> None:
        """Kill the program and every process that it has started, as a machine that fails does."""
        processes = _in_session(self._process.pid)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, _END_WITHIN_S)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ended(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_WITHIN_S)
        return None

    def _require(self, fine: bool, what: str) -> None:
        if not fine:
            log = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise UnavailableError(f"the program {self._program.script} {what}:\n{log}")


def _in_session(leader: int) -> list[psutil.Process]:
    """Return the processes of a session: a program's, also those that have lost their parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found
