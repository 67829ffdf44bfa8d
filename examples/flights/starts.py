"""How long a driver process takes to start, and how much of that is Spark's.

::

    process ──▶ session ─────────▶ first call ───────────▶ first commit
             │                  │                       │
             Python, the JVM    plan, first Spark job,   the function, its state; Spark's sink
             and Spark          first Python workers     and commit, in a JVM that is still cold
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from holdfast import clock
from holdfast.spark_integration.executor import local_dirs

_SESSIONS = "sessions"


def note_session(work_dir: Path) -> None:
    """Note that this process has its Spark session; the process that watches it reads the note."""
    with (work_dir / _SESSIONS).open("a") as file:
        file.write(f"{clock.monotonic_ms()}\n")


@dataclass(frozen=True)
class Start:
    """When a driver reached each step of its start, in ms since it was launched.

    Attributes
    ----------
    session_ms : int
        Spark's session was up.
    first_call_ms : int
        A worker made the query's first directory of local state.
    commit_ms : int
        Spark had committed the first micro-batch.
    """

    session_ms: int
    first_call_ms: int
    commit_ms: int

    def __str__(self) -> str:
        return (
            f"{self.session_ms / 1000:.1f} s until Spark was up, "
            f"{(self.first_call_ms - self.session_ms) / 1000:.1f} s until its workers called holdfast, "
            f"{(self.commit_ms - self.first_call_ms) / 1000:.1f} s until Spark had committed"
        )


class StartWatch:
    """Watches a driver from the moment that it is started.

    Parameters
    ----------
    work_dir : pathlib.Path
    local_root : pathlib.Path
        Below which its workers keep local state.
    query : str
        Spark's checkpoint location, below the work directory.
    """

    def __init__(self, work_dir: Path, local_root: Path, query: str = "query") -> None:
        self._query = work_dir / query
        self._work_dir = work_dir
        self._user = local_root / f"holdfast-{os.getuid()}"
        self._before = self._places()
        self._begun_ms = clock.monotonic_ms()
        self._first_call_ms: int | None = None

    def look(self) -> None:
        """Note a first call that has happened since the last look."""
        if self._first_call_ms is None and self._places() - self._before:
            self._first_call_ms = clock.monotonic_ms()

    def committed(self) -> Start:
        """Return what the start took: its first micro-batch has just been committed."""
        self.look()
        now_ms = clock.monotonic_ms()
        session_ms = int((self._work_dir / _SESSIONS).read_text().splitlines()[-1])
        first_call_ms = now_ms if self._first_call_ms is None else self._first_call_ms
        return Start(session_ms - self._begun_ms, first_call_ms - self._begun_ms, now_ms - self._begun_ms)

    def _places(self) -> set[Path]:
        """Return the executors' directories of the query."""
        try:
            query_id = json.loads((self._query / "metadata").read_text())["id"]
        except (FileNotFoundError, ValueError):
            return set()  # not started, or its file is being written
        kinds = (local_dirs.IN_MEMORY, local_dirs.ON_DISK)
        return {place for kind in kinds for place in self._user.glob(f"executor-*/{kind}/{query_id}")}
