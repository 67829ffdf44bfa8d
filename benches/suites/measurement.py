"""A question, and the paired runs that answer it.

::

    suite ──▶ Measurement ──▶ Entry ──▶ engine and job        benches/suites ──▶ benches/runs ──▶ benches/jobs
              "job-a"         "holdfast-memory"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.benches.report.results import Target
from holdfast.benches.runs.paired import Entry


@dataclass(frozen=True)
class Shape:
    """The user's own load, which a quick run measures."""

    keys: int = 1_000_000
    rows: int = 100_000
    value_bytes: int = 92
    shards: int = 2
    store_latency_ms: float = 0.0


@dataclass(frozen=True)
class Profile:
    """How much of a suite to run: a quick run measures the user's own `shape` within ten minutes on two cores."""

    quick: bool = False
    shape: Shape = Shape()


@dataclass(frozen=True)
class Measurement:
    suite: str  # results are stored as <suite>/<name>.json
    name: str
    question: str  # as the report prints it
    entries: Mapping[str, Entry]  # by label
    minutes: float  # all turns on two idle cores, to estimate the time left
    repeats: int = 1
    baseline: str = ""  # the label that others are compared with, if any
    along: str = ""  # the job's field that differs between entries of one engine, the report's x axis
    targets: tuple[Target, ...] = ()
    #: Compares the entries' results in fresh processes. Returns ``what`` was compared, the number of result ``rows``,
    #: and whether all are ``equal``; if they are not, nothing is measured.
    check: Callable[[], dict[str, Any]] | None = None
    micro: str = ""  # the module of benches/micro that pytest-benchmark runs instead of entries
    note: str = ""  # remarks on the sizes
    memory_gb: float = 6.0  # needs of the largest run; a machine with less leaves the measurement out
    disk_gb: float = 4.0
