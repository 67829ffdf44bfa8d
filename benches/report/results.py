"""What a bench found, as one JSON document, and whether it meets its targets.

::

    {"bench", "command", "started", "machine", "versions",
     "settings": {"jobs": {label: …}, "engines": {label: …}},
     "engines": {label: {"rows_per_second", "median_batch_ms", "runs": [{"batch_ms", "phases_ms", "cpu", "memory",
                                                                         "written", "storage", …}]}},
     "ratios": {"first/second": …}, "ratios_by_pair": {"first/second": […]},
     "state_bytes": {label: {"live_arrow", "local_peak", "local_final", "ratio", "after_batch"}},
     "targets": [{"what", "wanted", "measured", "met"}]}

What a run holds is described at `holdfast.benches.instruments.measured.Measured`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.benches.jobs.by_name import read_job
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.requests import requests_of
from holdfast.benches.jobs.store.snapshots import FULL_BYTES, NEW_BYTES
from holdfast.benches.runs.paired import Entry, Run, ratios

Document = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A figure to reach.

    Attributes
    ----------
    what : str
        A key of ``ratios``; ``"state_bytes <label>"``: the local state's peak by the live state;
        ``"budget <label>"``: the peak memory of the process that holds RocksDB by its budget;
        ``"changed <label>"``: the bytes that snapshots sent by those of full ones; ``"restore <label>"``: the time of
        a restore by that of a plain download, the median of the pairs; ``"longest <label>"``: the longest counted
        micro-batch of a run by the median; or ``"requests <label>"``: ours in a counted micro-batch.
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


_BACKENDS = ("memory", "filesystem", "rocksdb")
WITH_SNAPSHOTS, WITHOUT = "with snapshots", "without"
WITH_TIMEOUTS, WITHOUT_TIMEOUTS = "with timeouts", "without timeouts"
WITH_TTL, WITHOUT_TTL = "with TTL", "without TTL"
SPARK_BY_KEY = "spark-pandas-rocksdb"
# "At most 1.25 times the batch time" is "at least 1/1.25 of the throughput"; so with 1.1, 1.2 and 1.3.
TARGETS = {
    "job-a": (
        Target("holdfast-memory/spark-agg-rocksdb", at_least=5.0),
        Target("holdfast-filesystem/spark-agg-rocksdb", at_least=4.5),
        Target("holdfast-rocksdb/spark-agg-rocksdb", at_least=3.5),
        Target("holdfast-memory/floor", at_least=0.85),
        Target("state_bytes holdfast-memory", at_most=3.0),
    ),
    "job-b": (Target("budget holdfast-rocksdb", at_most=1.0),),
    "small-batch": (Target("holdfast-memory/spark-aiwps-count", at_least=1.0),),
    **dict.fromkeys(("shards-64", "shards-200"), (Target("holdfast-memory/spark-aiwps-count", at_least=1.5),)),
    "dropin": (
        *(Target(f"pandas-{name}/{SPARK_BY_KEY}", at_least=5.0) for name in _BACKENDS),
        *(Target(f"pandas-{name} x10/{SPARK_BY_KEY}", at_least=8.0) for name in _BACKENDS),
    ),
    "dropin-small": (Target(f"pandas-memory/{SPARK_BY_KEY}", at_least=0.91),),
    "dropin-tws": (
        Target("holdfast-memory-row/spark-tws-row", at_least=30.0),
        Target("holdfast-memory-pandas/spark-tws-pandas", at_least=15.0),
        Target("holdfast-rocksdb-row/spark-tws-row", at_least=15.0),
        Target("holdfast-memory-row x10/spark-tws-row", at_least=50.0),
        Target("holdfast-memory-pandas x10/spark-tws-pandas", at_least=20.0),
        Target("holdfast-rocksdb-row x10/spark-tws-row", at_least=25.0),
    ),
    "dropin-tws map": (Target("holdfast-memory-row/spark-tws-row", at_least=30.0),),
    "dropin-tws list": (Target("holdfast-memory-row/spark-tws-row", at_least=50.0),),
    "timers": (Target(f"{WITH_TIMEOUTS}/{WITHOUT_TIMEOUTS}", at_least=0.83),),
    "ttl": (Target(f"{WITH_TTL}/{WITHOUT_TTL}", at_least=0.77),),
    "from-files": (
        Target("holdfast-rocksdb/flink-sql-rocksdb-mini-batch", at_least=5.0),
        Target("holdfast-memory/pathway", at_least=2.0),
    ),
    "stalls": (Target("budget store-rocksdb", at_most=1.0),),
    "requests": (
        Target("requests holdfast-memory-s3", at_most=10.0),
        Target("requests holdfast-rocksdb-s3", at_most=10.0),
    ),
    "snapshots": tuple(Target(f"changed store-{name}", at_most=0.05) for name in _BACKENDS),
    "restore": tuple(Target(f"restore store-{name}", at_most=1.5) for name in _BACKENDS),
    **dict.fromkeys(
        ("uploads-a", "uploads-b"),
        (Target(f"{WITH_SNAPSHOTS}/{WITHOUT}", at_least=0.95), Target(f"longest {WITH_SNAPSHOTS}", at_most=2.0)),
    ),
}
# The process that holds RocksDB, where it holds nothing else of size.
_BUDGETED = {"holdfast-rocksdb": "server", "store-rocksdb": "store"}


def document(
    bench: str, entries: Mapping[str, Entry], runs: Mapping[str, list[Run]], facts: Mapping[str, Any]
) -> Document:
    """Return the document of a bench.

    Parameters
    ----------
    facts : mapping
        ``command``, ``started``, ``machine`` and ``versions``.
    """
    found: Document = {
        "bench": bench,
        **facts,
        "settings": {
            "jobs": {label: entry.job.stored() for label, entry in entries.items()},
            "engines": {label: of[0]["settings"] for label, of in runs.items()},
        },
        "engines": {label: _summary(of) for label, of in runs.items()},
        **ratios(runs),
        "state_bytes": {label: _largest_state(of) for label, of in runs.items()},
    }
    measured = {**found["ratios"], **dict(_sizes(found))}
    wanted = TARGETS.get(_with_variable(bench, entries), ())
    return found | {"targets": [target.check(measured[target.what]) for target in wanted if target.what in measured]}


def _with_variable(bench: str, entries: Mapping[str, Entry]) -> str:
    """Return the name under which `TARGETS` has a bench: ``dropin-tws list`` if that is what a key keeps."""
    kept = {getattr(entry.job, "variable", "value") for entry in entries.values()}
    return " ".join([bench, *sorted(kept - {"value"})])


def _largest_state(runs: list[Run]) -> dict[str, Any]:
    largest: dict[str, Any] = max((run["state_bytes"] for run in runs), key=lambda state: state["local_peak"])
    return largest


def _summary(runs: list[Run]) -> dict[str, Any]:
    return {
        "rows_per_second": round(statistics.median(run["rows_per_second"] for run in runs), 1),
        "median_batch_ms": statistics.median(run["median_batch_ms"] for run in runs),
        "runs": [{k: v for k, v in run.items() if k not in ("settings", "state_bytes")} for run in runs],
    }


def _sizes(found: Document) -> Iterator[tuple[str, float]]:
    """Yield what targets bound besides ratios, as far as it was measured."""
    for label, state in found["state_bytes"].items():
        if state["ratio"] is not None:
            yield f"state_bytes {label}", state["ratio"]
    for label, engine in found["engines"].items():
        counted = job_of(found, label).counted
        times = [[run["batch_ms"][batch] for batch in counted] for run in engine["runs"]]
        yield f"longest {label}", round(max(max(ms) / max(statistics.median(ms), 1e-3) for ms in times), 2)
        asked = asked_of_storage(found, label)
        if asked:
            yield f"requests {label}", round(requests_of(asked), 2)
        if NEW_BYTES in asked:
            yield f"changed {label}", round(asked[NEW_BYTES] / asked[FULL_BYTES], 4)
        if "plain download" in engine["runs"][0]["phases_ms"][0]:
            pairs = zip(counted_ms(found, label, "restore"), counted_ms(found, label, "plain download"), strict=True)
            yield f"restore {label}", round(statistics.median(ours / plain for ours, plain in pairs), 2)
    for label, kind in _BUDGETED.items():
        if label in found["engines"] and (budget_mb := job_of(found, label).memory_mb) is not None:
            peak = memory(found, label).get(kind)
            if peak is not None:
                yield f"budget {label}", round(peak["rss"] / (budget_mb << 20), 3)


def job_of(document: Document, label: str) -> Job:
    """Return the job that an entry ran."""
    return read_job(document["settings"]["jobs"][label])


def counted_ms(document: Document, label: str, phase: str | None = None) -> list[float]:
    """Return the times of an entry's counted micro-batches, of all runs; or those of one of their parts."""
    counted = job_of(document, label).counted
    runs = document["engines"][label]["runs"]
    if phase is None:
        return [run["batch_ms"][batch] for run in runs for batch in counted]
    return [run["phases_ms"][batch].get(phase, 0) for run in runs for batch in counted]


def memory(document: Document, label: str) -> dict[str, dict[str, int]]:
    """Return by kind of process the largest ``rss``, ``pss`` and ``anonymous`` bytes of all runs."""
    peaks: dict[str, dict[str, int]] = {}
    for run in document["engines"][label]["runs"]:
        for kind, held in run["memory"].items():
            before = peaks.get(kind, held)
            peaks[kind] = {name: max(size, before[name]) for name, size in held.items()}
    return peaks


def written(document: Document, label: str) -> dict[str, float]:
    """Return by kind of process the bytes written in a counted micro-batch, the mean of the runs; and ``durable``."""
    runs = document["engines"][label]["runs"]
    counted = len(job_of(document, label).counted)
    kinds = dict.fromkeys(kind for run in runs for kind in run["written"])
    return {kind: statistics.mean(run["written"].get(kind, 0) for run in runs) / counted for kind in kinds}


def asked_of_storage(document: Document, label: str) -> dict[str, float]:
    """Return what a counted micro-batch asked of the storage, by kind, the mean of the runs; empty if not counted."""
    runs = document["engines"][label]["runs"]
    counted = len(job_of(document, label).counted)
    kinds = sorted({kind for run in runs for kind in run.get("storage", {})})
    return {kind: statistics.mean(run.get("storage", {}).get(kind, 0) for run in runs) / counted for kind in kinds}


def usage(document: Document, label: str) -> dict[str, float]:
    """Return what one entry used in a counted micro-batch, the mean of its runs.

    Returns
    -------
    dict
        ``wall_s``; ``cpu_s``, which a busy machine changes least, and its parts by kind of process, as ``jvm_s``;
        ``cores`` busy; ``outside_ms``: the wall time of the driver's own work, during which no task runs.
    """
    counted = len(job_of(document, label).counted)
    runs = document["engines"][label]["runs"]
    kinds = dict.fromkeys(kind for run in runs for kind in run["cpu"])
    means = {kind: statistics.mean(run["cpu"].get(kind, 0) for run in runs) / counted for kind in kinds}
    busy = sum(means.values()) - means["wall"]
    in_all = counted_ms(document, label, "triggerExecution")
    of_tasks = counted_ms(document, label, "addBatch")
    return {f"{kind}_s": round(seconds, 3) for kind, seconds in means.items()} | {
        "cpu_s": round(busy, 3),
        "cores": round(busy / means["wall"], 2),
        "outside_ms": round(statistics.mean(a - b for a, b in zip(in_all, of_tasks, strict=True)), 1),
    }
