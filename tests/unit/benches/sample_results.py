"""A directory of results made by hand: several suites, curves, failures, a part; figures like those of real runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.benches.jobs.by_key import DropIn
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.shard import Restore
from holdfast.benches.report.results import Document, Target, document
from holdfast.benches.runs.paired import Entry, Run, summarize

MIB = 1 << 20
MACHINE = {"cpu": "a processor", "cores": 2, "memory_gb": 23.5, "os": "Linux 6.1 x86_64"}
VERSIONS = {"holdfast": "0.1.0", "python": "3.11.7", "java": "openjdk version 17", "pyspark": "4.3.0"}
STARTED = "2026-11-23T12:00:00+00:00"
FACTS = {"started": STARTED, "machine": MACHINE, "versions": VERSIONS}
SPARK = "spark-agg-rocksdb"
BACKENDS = ("holdfast-memory", "holdfast-filesystem", "holdfast-rocksdb")


def a_run(job: Job, batch_ms: float, *, mib: float = 1000, storage: Mapping[str, float] | None = None) -> Run:
    """Return a run whose micro-batches take about so long, each a little longer or shorter than the one before."""
    wobble = itertools.cycle((0.0, 0.06, -0.05, 0.02, 0.11, -0.03, 0.01))
    times = [round(batch_ms * (1 + next(wobble)), 1) for _ in range(job.all_batches)]
    counted = len(job.counted)
    held = {kind: int(mib * share * MIB) for kind, share in (("jvm", 0.5), ("python", 0.35), ("server", 0.15))}
    return {
        "batch_ms": times,
        "phases_ms": [{"triggerExecution": ms, "addBatch": ms * 0.8} for ms in times],
        "cpu": {"wall": counted * batch_ms / 1000, "jvm": counted * batch_ms / 1200, "python": counted * 0.2},
        "memory": {kind: {"rss": size, "pss": size, "anonymous": size} for kind, size in held.items()},
        "written": {"jvm": 28.0 * MIB * counted, "server": 12.0 * MIB * counted, "durable": 11.0 * MIB * counted},
        "storage": dict(storage or {}),
        "settings": {"spark.master": "local[2]"},
        "state_bytes": {"live_arrow": None, "ratio": None, "after_batch": []}
        | {"local_peak": job.keys * 64, "local_final": job.keys * 60},
        "busy_before_cores": 0.1,
        **summarize(times, job),
    }


def a_document(name: str, entries: Mapping[str, tuple[Entry, float, float]], turns: int = 3, **more: Any) -> Document:
    """Return a document: by label an entry, the ms of its micro-batches, and its MiB; turns differ by 2 %."""
    runs = {
        label: [a_run(entry.job, ms * (1 + 0.02 * ((turn + place) % turns)), mib=mib) for turn in range(turns)]
        for place, (label, (entry, ms, mib)) in enumerate(entries.items())
    }
    of = {label: entry for label, (entry, _, _) in entries.items()}
    facts = FACTS | {"command": f"holdfast bench run --full --suite {more.get('suite', 'jobs')}"}
    found = document(name, of, runs, facts)
    # Targets come and go; those of these samples stay.
    targets = [
        target.check(found["ratios"][target.what])
        for target in more.pop("targets", ())
        if target.what in found["ratios"]
    ]
    return {**found, "targets": targets, "entries": {label: entry.engine for label, entry in of.items()}, **more}


def job_a(turns: int = 3, rocksdb_ms: float = 2132.0) -> Document:
    """Return job A, where holdfast wins; slow RocksDB loses."""
    job = JobA(batches=8, warmup=2)
    measured = (("memory", 1372.0, 2800), ("filesystem", 1364.0, 2190), ("rocksdb", rocksdb_ms, 2690))
    entries = {f"holdfast-{name}": (Entry(f"holdfast-{name}", job), ms, mib) for name, ms, mib in measured}
    entries |= {SPARK: (Entry(SPARK, job), 6188.0, 1490), "floor": (Entry("floor", job), 963.0, 2370)}
    targets = (
        Target("holdfast-rocksdb/spark-agg-rocksdb", at_least=1.5),
        Target("holdfast-memory/floor", at_least=0.8),
    )
    return a_document("job-a", entries, turns, baseline=SPARK, targets=targets)


def growth() -> Document:
    """Return curves along the keys that cross: memory, then filesystem; Spark overtakes RocksDB."""
    times = {
        "holdfast-memory": {100_000: 300, 1_000_000: 500, 10_000_000: 1600},
        "holdfast-filesystem": {100_000: 380, 1_000_000: 620, 10_000_000: 1150, 50_000_000: 2900},
        "holdfast-rocksdb": {100_000: 500, 1_000_000: 900, 10_000_000: 2100, 50_000_000: 4000},
        SPARK: {100_000: 900, 1_000_000: 1400, 10_000_000: 2040, 50_000_000: 3300},
    }
    measured = [(engine, keys, float(ms)) for engine, of in times.items() for keys, ms in of.items()]
    jobs = {keys: JobB(keys=keys, batches=5, warmup=1, fill_rows=keys) for _, keys, _ in measured}
    entries = {f"{e}, {keys} keys": (Entry(e, jobs[keys]), ms, 800 + keys / 20_000) for e, keys, ms in measured}
    return a_document("keys", entries, 2, suite="growth", baseline=SPARK, along="keys")


def restore() -> Document:
    job = Restore(rows=10_000, batches=4, warmup=1)
    ms = {"store-memory": (2400.0, 1650.0), "store-filesystem": (2800.0, 1280.0), "store-rocksdb": (1600.0, 1350.0)}
    entries = {label: (Entry(label, job), restored, 600.0) for label, (restored, _) in ms.items()}
    found = a_document("restore", entries, 1, suite="durability")
    for label, engine in found["engines"].items():
        for run in engine["runs"]:
            run["phases_ms"] = [{"restore": took, "plain download": ms[label][1]} for took in run["batch_ms"]]
            run["written"] = {}
    return found


def requests() -> Document:
    jobs = {shards: JobA(partitions=shards, batches=4, warmup=1) for shards in (8, 64, 200)}
    entries = {f"{n} shards": (Entry("holdfast-memory-s3", job), n * 12.0, 1500) for n, job in jobs.items()}
    found = a_document("requests", entries, 1, suite="durability", along="partitions")
    for label, engine in found["engines"].items():
        shards = found["settings"]["jobs"][label]["partitions"]
        engine["runs"][0]["storage"] = {"put": shards * 0.05, "get": 3.0, "bytes up": shards * 9000.0}
    return found


def peers() -> Document:
    """Return other engines, with an equality check."""
    job = DropIn(batches=6, warmup=2)
    ms = {"holdfast-memory": 800.0, "flink-sql-rocksdb": 4300.0, "pathway": 1500.0, "bytewax": 9000.0}
    entries = {label: (Entry(label, job), took, 900.0) for label, took in ms.items()}
    equality = {"what": "count and sum of sampled keys", "rows": 40_000, "equal": True}
    return a_document("same-file", entries, 3, suite="peers", baseline="flink-sql-rocksdb", equality=equality)


def micro() -> dict[str, Any]:
    return {
        "datetime": STARTED,
        "machine_info": {"cpu": {"brand_raw": "a processor", "count": 2}},
        "benchmarks": [*_operations(), {"name": "test_pack", "extra_info": {}, "stats": _stats(0.036)}],
    }


def _operations() -> Iterator[dict[str, Any]]:
    for operation, us in (("get", 0.1), ("commit", 0.3)):
        for factor, backend in ((1, "memory"), (1.3, "filesystem"), (4, "rocksdb")):
            for keys in (1_000, 100_000, 1_000_000):
                about = {"backend": backend, "keys": keys, "value_bytes": 100}
                took_s = us * factor * keys / 1e6 + 0.0004
                yield {"name": f"test_{operation}[{backend}-{keys}]", "extra_info": about, "stats": _stats(took_s)}


def _stats(median_s: float) -> dict[str, Any]:
    return {"median": median_s, "min": median_s * 0.9, "max": median_s * 1.4, "rounds": 20}


def full() -> dict[tuple[str, str], Document]:
    """Return the documents of a full run by suite and name."""
    return {
        ("jobs", "job-a"): job_a(),
        ("jobs", "by-key-pandas"): dropin(),
        ("growth", "keys"): growth(),
        ("durability", "restore"): restore(),
        ("durability", "requests"): requests(),
        ("peers", "same-file"): peers(),
        ("micro", "micro"): micro(),
    }


def dropin() -> Document:
    """Return a function by key, which holdfast on RocksDB runs no faster than Spark."""
    job = DropIn(batches=6, warmup=2)
    ms = {"pandas-memory": 2918.0, "pandas-filesystem": 2466.0, "pandas-rocksdb": 11_300.0}
    entries = {label: (Entry(label, job), took, 1500.0) for label, took in ms.items()}
    entries["spark-pandas-rocksdb"] = (Entry("spark-pandas-rocksdb", job), 11_133.0, 1450.0)
    return a_document("by-key-pandas", entries, 2, baseline="spark-pandas-rocksdb")


_QUESTIONS = {
    "job-a": "How fast is a running count and sum, written vectorised?",
    "by-key-pandas": "How fast is a function of applyInPandasWithState, unchanged?",
    "keys": "How does throughput change as the state grows?",
    "restore": "How long does it take to restore 1 GB from S3?",
    "requests": "How many requests does a micro-batch make?",
    "same-file": "How fast are other engines at the same aggregation?",
    "micro": "What does each operation of the store cost?",
    "own-load": "Which backend suits your own load?",
}
_MISSING = (
    ("nexmark", "q5", "How fast is Nexmark's query 5?", "failed", "a run of nexmark-rocksdb failed: no space left"),
    ("peers", "quix", "How fast is Quix Streams?", "left out", "Quix Streams has no wheels for this Python"),
    ("growth", "executors", "How does throughput change with executors?", "to do", ""),
)


def write(folder: Path, documents: Mapping[tuple[str, str], Mapping[str, Any]], **run: Any) -> Path:
    plan = [
        {"suite": suite, "name": name, "question": _QUESTIONS[name], "minutes": 5, "state": "done", "reason": ""}
        | {field: document.get(field, "") for field in ("baseline", "along")}
        for (suite, name), document in documents.items()
    ]
    plan += [dict(zip(("suite", "name", "question", "state", "reason"), line, strict=True)) for line in _MISSING]
    shape = {"keys": 1_000_000, "rows": 100_000, "value_bytes": 92, "shards": 2, "store_latency_ms": 0.0}
    facts = {"format": 1, "profile": "full", "shape": shape, "seed": 1, **FACTS, "plan": plan}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(facts | run))
    for (suite, name), found in documents.items():
        (folder / suite).mkdir(exist_ok=True)
        (folder / suite / f"{name}.json").write_text(json.dumps(found))
    return folder


def quick(turns: int = 3) -> dict[tuple[str, str], Document]:
    """Return the document of a quick run."""
    job = JobB(rows=100_000, keys=1_000_000, batches=8, warmup=2, fill_rows=500_000)
    ms = {
        "holdfast-memory": (640.0, 2600.0),
        "holdfast-filesystem": (655.0, 1900.0),
        "holdfast-rocksdb": (1010.0, 1700.0),
    }
    entries = {label: (Entry(label, job), took, mib) for label, (took, mib) in ms.items()}
    entries[SPARK] = (Entry(SPARK, job), 1370.0, 2700.0)
    return {("own-load", "own-load"): a_document("own-load", entries, turns, suite="own-load", baseline=SPARK)}
