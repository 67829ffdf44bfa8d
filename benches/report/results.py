"""A bench's results as one JSON document, checked against its targets.

::

    {"bench", "command", "started", "machine", "versions",
     "settings": {"jobs": {label: …}, "engines": {label: …}},
     "engines": {label: {"rows_per_second", "median_batch_ms", "runs": [{"batch_ms", "phases_ms", "cpu", "memory",
                                                                         "written", "storage", …}]}},
     "ratios": {"first/second": …}, "ratios_by_pair": {"first/second": […]},
     "state_bytes": {label: {"live_arrow", "local_peak", "local_final", "ratio", "after_batch"}},
     "targets": [{"what", "wanted", "measured", "met"}]}

`holdfast.benches.instruments.measured.Measured` describes a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.benches.jobs.by_name import read_job
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.shard import PLAIN_DOWNLOAD, RESTORE
from holdfast.benches.runs.paired import Entry, Run, ratios

Document = dict[str, Any]
# The engine with a memory budget, and the engine without state.
_BUDGETED, _FLOOR = "holdfast-rocksdb", "floor"


@dataclass(frozen=True)
class Target:
    """A bound for a figure.

    `what` is a key of ``ratios``; ``"state_bytes <label>"``, peak local state / live state; ``"budget <label>"``, peak
    memory of workers and state server beyond that without state / memory budget; ``"restore <label>"``, median of
    restore time / plain download time; or ``"longest <label>"``, longest counted micro-batch of a run / median.
    """

    what: str
    at_least: float | None = None
    at_most: float | None = None

    def check(self, measured: float) -> dict[str, Any]:
        """Return the target with its measured value."""
        wanted = f"at least {self.at_least}" if self.at_most is None else f"at most {self.at_most}"
        met = measured >= (self.at_least or 0) and (self.at_most is None or measured <= self.at_most)
        return {"what": self.what, "wanted": wanted, "measured": measured, "met": met}


def document(
    bench: str,
    entries: Mapping[str, Entry],
    runs: Mapping[str, list[Run]],
    facts: Mapping[str, Any],
    targets: Sequence[Target] = (),
) -> Document:
    """Return the document of a bench; `facts` are its ``command``, ``started``, ``machine`` and ``versions``."""
    found: Document = {
        "bench": bench,
        **facts,
        "settings": {
            "jobs": {label: entry.job.stored() for label, entry in entries.items()},
            "engines": {label: of[0]["settings"] for label, of in runs.items()},
        },
        "engines": {label: _summary(of) for label, of in runs.items()},
        **ratios(runs),
        "state_bytes": {
            label: max((run["state_bytes"] for run in of), key=lambda state: state["local_peak"])
            for label, of in runs.items()
        },
    }
    measured = {**found["ratios"], **dict(_sizes(found))}
    return found | {"targets": [target.check(measured[target.what]) for target in targets if target.what in measured]}


def _summary(runs: list[Run]) -> dict[str, Any]:
    return {
        "rows_per_second": round(statistics.median(run["rows_per_second"] for run in runs), 1),
        "median_batch_ms": statistics.median(run["median_batch_ms"] for run in runs),
        "runs": [{k: v for k, v in run.items() if k not in ("settings", "state_bytes")} for run in runs],
    }


def _sizes(found: Document) -> Iterator[tuple[str, float]]:
    """Yield the measured figures other than ratios that targets can bound."""
    for label, state in found["state_bytes"].items():
        if state["ratio"] is not None:
            yield f"state_bytes {label}", state["ratio"]
    for label, engine in found["engines"].items():
        counted = job_of(found, label).counted
        times = [[run["batch_ms"][batch] for batch in counted] for run in engine["runs"]]
        yield f"longest {label}", round(max(max(ms) / max(statistics.median(ms), 1e-3) for ms in times), 2)
        if PLAIN_DOWNLOAD in engine["runs"][0]["phases_ms"][0]:
            pairs = zip(counted_ms(found, label, RESTORE), counted_ms(found, label, PLAIN_DOWNLOAD), strict=True)
            yield f"restore {label}", round(statistics.median(ours / plain for ours, plain in pairs), 2)
    if {_BUDGETED, _FLOOR} <= found["engines"].keys() and (budget_mb := job_of(found, _BUDGETED).memory_mb) is not None:
        ours, without = (
            sum(held["pss"] for kind, held in memory(found, label).items() if kind != "jvm")
            for label in (_BUDGETED, _FLOOR)
        )
        if ours and without:  # measured
            yield f"budget {_BUDGETED}", round((ours - without) / (budget_mb << 20), 3)


def job_of(document: Document, label: str) -> Job:
    return read_job(document["settings"]["jobs"][label])


def counted_ms(document: Document, label: str, phase: str | None = None) -> list[float]:
    """Return the times of an entry's counted micro-batches in all runs, or of one of their phases."""
    counted = job_of(document, label).counted
    runs = document["engines"][label]["runs"]
    if phase is None:
        return [run["batch_ms"][batch] for run in runs for batch in counted]
    return [run["phases_ms"][batch].get(phase, 0) for run in runs for batch in counted]


def memory(document: Document, label: str) -> dict[str, dict[str, int]]:
    """Return the peak ``rss``, ``pss`` and ``anonymous`` bytes of all runs by kind of process."""
    peaks: dict[str, dict[str, int]] = {}
    for run in document["engines"][label]["runs"]:
        for kind, held in run["memory"].items():
            before = peaks.get(kind, held)
            peaks[kind] = {name: max(size, before[name]) for name, size in held.items()}
    return peaks


def written(document: Document, label: str) -> dict[str, float]:
    """Return the mean bytes written per counted micro-batch by kind of process, and ``durable``."""
    return _by_batch(document, label, "written")


def asked_of_storage(document: Document, label: str) -> dict[str, float]:
    """Return the mean requests to the storage per counted micro-batch by kind; empty if not counted."""
    return dict(sorted(_by_batch(document, label, "storage").items()))


def _by_batch(document: Document, label: str, part: str) -> dict[str, float]:
    runs, counted = document["engines"][label]["runs"], len(job_of(document, label).counted)
    kinds = dict.fromkeys(kind for run in runs for kind in run.get(part, {}))
    return {kind: statistics.mean(run.get(part, {}).get(kind, 0) for run in runs) / counted for kind in kinds}


def requests_of(counts: Mapping[str, float]) -> float:
    """Return the number of holdfast's requests."""
    return sum(number for what, number in counts.items() if "bytes" not in what and not what.startswith("Spark"))


def usage(document: Document, label: str) -> dict[str, float]:
    """Return the mean use of an entry per counted micro-batch.

    ``wall_s``; ``cpu_s``, which a busy machine changes least, and its parts by kind of process, as ``jvm_s``;
    ``cores`` busy; ``outside_ms``, the driver's wall time during which no task runs.
    """
    means = _by_batch(document, label, "cpu")
    busy = sum(means.values()) - means["wall"]
    in_all = counted_ms(document, label, "triggerExecution")
    of_tasks = counted_ms(document, label, "addBatch")
    return {f"{kind}_s": round(seconds, 3) for kind, seconds in means.items()} | {
        "cpu_s": round(busy, 3),
        "cores": round(busy / means["wall"], 2),
        "outside_ms": round(statistics.mean(a - b for a, b in zip(in_all, of_tasks, strict=True)), 1),
    }
