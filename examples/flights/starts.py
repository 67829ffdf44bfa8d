"""Measures the start of a driver process, and Spark's part of it.

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
    """Note when this process has its Spark session, for the process that watches it."""
    with (work_dir / _SESSIONS).open("a") as file:
        file.write(f"{clock.monotonic_ms()}\n")


@dataclass(frozen=True)
class Start:
    """The steps of a driver's start, in ms since its launch."""

    session_ms: int  #: Spark's session was up
    first_call_ms: int  #: A worker created the query's first directory of local state
    commit_ms: int  #: Spark had committed the first micro-batch

    def __str__(self) -> str:
        return (
            f"{self.session_ms / 1000:.1f} s until Spark was up, "
            f"{(self.first_call_ms - self.session_ms) / 1000:.1f} s until its workers called holdfast, "
            f"{(self.commit_ms - self.first_call_ms) / 1000:.1f} s until Spark had committed"
        )


class StartWatch:
    """Watches a driver's start; `local_root` has its workers' local state, `query` its checkpoint location."""

    def __init__(self, work_dir: Path, local_root: Path, query: str = "query") -> None:
        self._query = work_dir / query
        self._work_dir = work_dir
        self._user = local_root / f"holdfast-{os.getuid()}"
        self._before = self._places()
        self._begun_ms = clock.monotonic_ms()
        self._first_call_ms: int | None = None

    def look(self) -> None:
        """Check for the first call."""
        if self._first_call_ms is None and self._places() - self._before:
            self._first_call_ms = clock.monotonic_ms()

    def committed(self) -> Start:
        """Return the times of the start, right after the first commit."""
        self.look()
        now_ms = clock.monotonic_ms()
        session_ms = int((self._work_dir / _SESSIONS).read_text().splitlines()[-1])
        first_call_ms = now_ms if self._first_call_ms is None else self._first_call_ms
        return Start(session_ms - self._begun_ms, first_call_ms - self._begun_ms, now_ms - self._begun_ms)

    def _places(self) -> set[Path]:
        """Return the query's directories in each executor's local directory."""
        try:
            query_id = json.loads((self._query / "metadata").read_text())["id"]
        except (FileNotFoundError, ValueError):
            return set()  # not started, or the file is being written
        kinds = (local_dirs.IN_MEMORY, local_dirs.ON_DISK)
        return {place for kind in kinds for place in self._user.glob(f"executor-*/{kind}/{query_id}")}
