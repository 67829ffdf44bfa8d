"""Paired runs: engines take turns on one machine, so that a disturbance affects all of them.

::

    turn 1:  B  C  A      each run is a fresh process; the order is redrawn for each turn
    turn 2:  A  B  C      ratio of A to B: the median of the ratios within each turn
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.benches.instruments.machine import busy_cores
from holdfast.benches.jobs.job import Job
from holdfast.benches.runs.child_process import call_in_child
from holdfast.spark_integration.executor.local_dirs import choose_root

Run = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One side of a comparison: an engine and the job it runs."""

    engine: str
    job: Job


def run_engine(entry: Entry, *, disk: str | None = None, limit_s: float | None = None) -> Run:
    """Run an engine once in a fresh process, within `limit_s`, and return what was measured. Raises `BenchError`."""
    work = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=disk))
    memory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=choose_root(None, in_memory=True)))
    (work / "disk").mkdir()
    busy = busy_cores()
    try:
        run: Run = call_in_child(
            f"a run of {entry.engine}",
            "holdfast.benches.runs.by_name:measured",
            *(entry.engine, entry.job.stored(), str(work / "disk"), str(memory)),
            folders=[work, memory],
            limit_s=limit_s,
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    return run | summarize(run["batch_ms"], entry.job) | {"busy_before_cores": round(busy, 2)}


def summarize(batch_ms: Sequence[float], job: Job) -> dict[str, float]:
    """Return throughput and median time of the counted micro-batches."""
    counted = [batch_ms[batch] for batch in job.counted]
    return {
        "rows_per_second": round(job.rows * len(counted) / sum(counted) * 1000, 1),
        "median_batch_ms": statistics.median(counted),
    }


def ratios(runs: Mapping[str, list[Run]]) -> dict[str, dict[str, Any]]:
    """Return the throughput ratios of all pairs of entries, keyed ``first/second``: the median and every turn's."""
    by_pair = {
        f"{first}/{second}": [
            round(a["rows_per_second"] / b["rows_per_second"], 3)
            for a, b in zip(runs[first], runs[second], strict=True)
        ]
        for first, second in itertools.combinations(runs, 2)
    }
    return {
        "ratios": {name: round(statistics.median(values), 3) for name, values in by_pair.items()},
        "ratios_by_pair": by_pair,
    }
