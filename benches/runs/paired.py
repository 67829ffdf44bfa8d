"""Paired runs: engines take turns on one machine, so that what disturbs the machine disturbs all of them.

::

    repeat 1:  A  B  C      each a fresh process
    repeat 2:  A  B  C      ratio of A to B: the median of the ratios within each repeat
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.benches.instruments import spans
from holdfast.benches.instruments.machine import busy_cores
from holdfast.benches.jobs.job import Job
from holdfast.benches.runs.child_process import run_child
from holdfast.errors import HoldfastError
from holdfast.spark_integration.executor.local_dirs import choose_root

Run = dict[str, Any]


class BenchError(HoldfastError):
    """A run of an engine failed."""


def run_engine(
    engine: str,
    job: Job,
    *,
    profile: bool = False,
    disk: str | None = None,
    limit_s: float | None = None,
) -> Run:
    """Run one engine once in a fresh process and return what was measured.

    Parameters
    ----------
    disk : str, optional
        Directory on the disk to use; by default the temporary directory.
    limit_s : float, optional
        After which the run has failed.

    Raises
    ------
    BenchError
        The process failed; the message has the end of its log.
    """
    work = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=disk))
    memory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=choose_root(None, in_memory=True)))
    folders = {name: work / name for name in ("disk", "spans")}
    for folder in folders.values():
        folder.mkdir()
    order = {
        "engine": engine,
        "job": job.stored(),
        "disk": str(folders["disk"]),
        "memory": str(memory),
        "profile": str(folders["spans"]) if profile else None,
        "result": str(work / "result.json"),
    }
    busy = busy_cores()
    try:
        ended = run_child(order, {spans.FOLDER_VARIABLE: str(folders["spans"])} if profile else {}, limit_s)
        if ended.exit_status is None:
            raise BenchError(f"a run of {engine} took longer than allowed and was ended:\n{ended.log}", limit_s=limit_s)
        if ended.exit_status != 0:
            raise BenchError(f"a run of {engine} failed:\n{ended.log}", exit_status=ended.exit_status)
        run: Run = json.loads((work / "result.json").read_text())
        if profile:
            run["spans"] = spans.collect(folders["spans"], job.counted)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    return run | summarize(run["batch_ms"], job) | {"busy_before_cores": round(busy, 2)}


def summarize(batch_ms: Sequence[float], job: Job) -> dict[str, float]:
    """Return rows a second over the counted micro-batches, and their median time."""
    counted = [batch_ms[batch] for batch in job.counted]
    return {
        "rows_per_second": round(job.rows * len(counted) / sum(counted) * 1000, 1),
        "median_batch_ms": statistics.median(counted),
    }


@dataclass(frozen=True)
class Entry:
    """One of the things compared: an engine and the job it runs."""

    engine: str
    job: Job


def run_paired(
    entries: Mapping[str, Entry],
    repeats: int,
    *,
    profile: bool = False,
    disk: str | None = None,
    tell: Callable[[str, int, Run | None], None] = lambda *_: None,
) -> dict[str, list[Run]]:
    """Run every entry `repeats` times in turns.

    Parameters
    ----------
    entries : mapping of str to Entry
        By label.
    tell : callable
        Called with label, repeat and None before each run, and with its result after it.

    Returns
    -------
    dict of str to list
        By label, one result for each repeat.
    """
    runs: dict[str, list[Run]] = {label: [] for label in entries}
    for repeat in range(repeats):
        for label, entry in entries.items():
            tell(label, repeat, None)
            run = run_engine(entry.engine, entry.job, profile=profile, disk=disk)
            runs[label].append(run)
            tell(label, repeat, run)
    return runs


def ratios(runs: Mapping[str, list[Run]]) -> dict[str, dict[str, Any]]:
    """Return the throughput of each entry by that of each later one.

    Returns
    -------
    dict
        ``ratios``: the median over the pairs; ``ratios_by_pair``: each pair's. Keys are ``first/second``.
    """
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
