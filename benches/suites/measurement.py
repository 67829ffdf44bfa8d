"""A question that somebody asks who must choose, and the paired runs that answer it.

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
    """The user's own load, which a quick run measures in place of the suites' sizes."""

    keys: int = 1_000_000
    rows: int = 100_000
    value_bytes: int = 92
    shards: int = 2
    store_latency_ms: float = 0.0


@dataclass(frozen=True)
class Profile:
    """How much of a suite to run: a quick run ends within ten minutes on two cores, on the user's own `shape`."""

    quick: bool = False
    shape: Shape = Shape()


@dataclass(frozen=True)
class Measurement:
    """One question."""

    suite: str  # its results are stored as <suite>/<name>.json
    name: str
    question: str  # as the report asks it
    entries: Mapping[str, Entry]  # what is compared, by label
    minutes: float  # of all turns, on two idle cores: for the time left
    repeats: int = 1
    baseline: str = ""  # the label that the others are read against, if any
    along: str = ""  # the field of the jobs that differs between entries of one engine: what the report shows along
    targets: tuple[Target, ...] = ()
    #: Compares what the entries compute, in processes of its own. Returns ``what`` was compared, the ``rows`` of the
    #: result, and whether all are ``equal``; where they are not, no time counts.
    check: Callable[[], dict[str, Any]] | None = None
    micro: str = ""  # the module of benches/micro that pytest-benchmark runs in place of entries
    note: str = ""  # what a reader must know of the sizes
    memory_gb: float = 6.0  # what the largest run needs: a machine that has less leaves the measurement out
    disk_gb: float = 4.0
