"""What a bench found, as one JSON document, and whether it meets its targets.

::

    {"bench", "command", "started", "machine", "versions",
     "settings": {"jobs": {label: …}, "spark": {label: …}},
     "engines": {label: {"rows_per_second", "median_batch_ms", "runs": [{"batch_ms", "phases_ms", "cpu", …}]}},
     "ratios": {"first/other": …}, "ratios_by_pair": {"first/other": […]},
     "state_bytes": {label: {"live_arrow", "local_peak", "local_final", "ratio", "after_batch"}},
     "targets": [{"what", "wanted", "measured", "met"}]}
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.benches.paired import Entry, Run, ratios

Document = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A figure to reach.

    Attributes
    ----------
    what : str
        A key of ``ratios``, or ``"state_bytes <label>"``.
    at_least, at_most : float or None
        One of the two.
    """

    what: str
    at_least: float | None = None
    at_most: float | None = None

    def check(self, measured: float) -> dict[str, Any]:
        """Return the target beside what was measured."""
        wanted = f"at least {self.at_least}" if self.at_most is None else f"at most {self.at_most}"
        met = measured >= (self.at_least or 0) and (self.at_most is None or measured <= self.at_most)
        return {"what": self.what, "wanted": wanted, "measured": measured, "met": met}


# "At most 1.25 times the batch time" is "at least 1/1.25 of the throughput".
TARGETS = {
    "job-a": (
        Target("holdfast-memory/spark-agg-rocksdb", at_least=4.5),
        Target("holdfast-memory/floor", at_least=0.8),
        Target("state_bytes holdfast-memory", at_most=3.0),
    ),
    "small-batch": (Target("holdfast-memory/spark-aiwps-count", at_least=0.8),),
}


def document(
    bench: str, entries: Mapping[str, Entry], runs: Mapping[str, list[Run]], facts: Mapping[str, Any]
) -> Document:
    """Return the document of a bench.

    Parameters
    ----------
    facts : mapping
        ``command``, ``started``, ``machine`` and ``versions``.
    """
    state = {label: worst for label, of in runs.items() if (worst := _largest_state(of)) is not None}
    found: Document = {
        "bench": bench,
        **facts,
        "settings": {
            "jobs": {label: asdict(entry.job) for label, entry in entries.items()},
            "spark": {label: of[0]["settings"] for label, of in runs.items()},
        },
        "engines": {label: _summary(of) for label, of in runs.items()},
        **ratios(runs),
        "state_bytes": state,
    }
    return found | {"targets": _check_targets(bench, found)}


def _largest_state(runs: list[Run]) -> dict[str, Any] | None:
    measured = [run["state_bytes"] for run in runs if run["state_bytes"] is not None]
    return max(measured, key=lambda state: state["ratio"], default=None)


def _summary(runs: list[Run]) -> dict[str, Any]:
    return {
        "rows_per_second": round(statistics.median(run["rows_per_second"] for run in runs), 1),
        "median_batch_ms": statistics.median(run["median_batch_ms"] for run in runs),
        "runs": [{k: v for k, v in run.items() if k not in ("settings", "state_bytes")} for run in runs],
    }


def _check_targets(bench: str, found: Document) -> list[dict[str, Any]]:
    measured = dict(found["ratios"])
    measured |= {f"state_bytes {label}": state["ratio"] for label, state in found["state_bytes"].items()}
    return [t.check(measured[t.what]) for t in TARGETS.get(bench, ()) if t.what in measured]


def usage(document: Document, label: str) -> dict[str, float]:
    """Return what one entry used in a counted micro-batch, the mean of its runs.

    Returns
    -------
    dict
        ``wall_s``; ``cpu_s`` and its parts ``jvm_s``, ``python_s``, ``server_s``, which a busy machine changes
        least; ``cores`` busy; ``outside_ms``: the wall time of the driver's own work, during which no task runs.
    """
    job = document["settings"]["jobs"][label]
    counted = job["batches"] - job["warmup"]
    runs = document["engines"][label]["runs"]
    means = {
        f"{kind}_s": statistics.mean(run["cpu"][kind] for run in runs) / counted
        for kind in ("wall", "jvm", "python", "server")
    }
    phases = [p for run in runs for p in run["phases_ms"][job["warmup"] :]]
    outside = statistics.mean(p["triggerExecution"] - p.get("addBatch", 0) for p in phases)
    busy = means["jvm_s"] + means["python_s"] + means["server_s"]
    return {k: round(v, 3) for k, v in means.items()} | {
        "cpu_s": round(busy, 3),
        "cores": round(busy / means["wall_s"], 2),
        "outside_ms": round(outside, 1),
    }
