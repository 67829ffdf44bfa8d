"""All suites, full and quick. To add one, write a function and list it in `SUITES`.

Sizes are chosen so that the JVM is warm after the warm-up, and a suite takes about 20 minutes on two idle cores,
`nexmark` 30, `operators` 40, `jobs` 50. ``benches/PEERS.md`` lists the peers that are measured, and those that a
licence or an API rules out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.benches.instruments.object_store import BUCKET
from holdfast.benches.jobs.by_key import ByProcessor, DropIn
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.operators import Operators
from holdfast.benches.jobs.shard import Restore, Size, Snapshots
from holdfast.benches.nexmark.job import QUERIES, Nexmark
from holdfast.benches.peers.engines import ENVIRONMENTS
from holdfast.benches.peers.job import FromFiles
from holdfast.benches.report.results import Target
from holdfast.benches.runs.engines import BACKENDS
from holdfast.benches.runs.equality import checked
from holdfast.benches.runs.paired import Entry
from holdfast.benches.suites import own_load
from holdfast.benches.suites.measurement import Measurement, Profile

_VECTORISED, _PANDAS, _STORES = (
    tuple(f"{kind}-{backend}" for backend in BACKENDS) for kind in ("holdfast", "pandas", "store")
)
_SPARK, _SPARK_IN_HEAP, _SPARK_IN_PYTHON = "spark-agg-rocksdb", "spark-agg-hdfs", "spark-aiwps-count"
_SPARK_BY_KEY = "spark-pandas-rocksdb"
_BY_ROW = tuple(f"{name}-row" for name in _VECTORISED)
_LOCAL = "local disk"
NEXMARK_ON_SPARK = "nexmark-spark"
NEXMARK = ("nexmark-memory", "nexmark-rocksdb", NEXMARK_ON_SPARK)
_FLINK = "flink-sql-rocksdb-mini-batch"
_PEER_QUERIES = (
    _FLINK,
    *("flink-sql-rocksdb", "flink-sql-heap-mini-batch", "pathway", "pathway-backlog"),
    *("flink-sql-rocksdb-mini-batch-volatile", "flink-sql-heap-mini-batch-volatile", "pathway-volatile"),
)
_PEER_FUNCTIONS = tuple(
    f"{peer}{kind}" for kind in ("", "-volatile") for peer in ("flink-process-rocksdb", "bytewax", "quixstreams")
)
# More shards take longer than the minute of a quick run.
_QUICK_SHARDS_MAX = 16


def _same(job: Job, *engines: str) -> dict[str, Entry]:
    return {engine: Entry(engine, job) for engine in engines}


def jobs(profile: Profile) -> list[Measurement]:
    """Jobs A and B on every backend, against Spark's aggregation and its Python state APIs."""
    return [] if profile.quick else [*_totals(), *_by_key(), *_small_batches()]


def _totals() -> Iterable[Measurement]:
    targets: tuple[Target, ...] = (
        Target("holdfast-memory/spark-agg-rocksdb", at_least=5.2),
        Target("holdfast-filesystem/spark-agg-rocksdb", at_least=5.0),
        Target("holdfast-rocksdb/spark-agg-rocksdb", at_least=4.5),
        Target("holdfast-memory/floor", at_least=0.85),
        Target("state_bytes holdfast-memory", at_most=2.0),
    )
    question = "How fast is a running count and sum, written vectorised?"
    entries = _same(JobA(batches=6), *_VECTORISED, _SPARK, _SPARK_IN_HEAP, "floor")
    yield Measurement("jobs", "job-a", question, entries, 9.5, 3, _SPARK, memory_gb=8, targets=targets)
    targets = (
        Target("holdfast-memory/spark-agg-rocksdb", at_least=1.7),
        Target("holdfast-filesystem/spark-agg-rocksdb", at_least=1.9),
        Target("holdfast-rocksdb/spark-agg-rocksdb", at_least=1.7),
        Target("state_bytes holdfast-memory", at_most=2.0),
        Target("budget holdfast-rocksdb", at_most=1.0),
    )
    question = "How fast are micro-batches that touch a few of 2 million keys?"
    entries = _same(JobB(batches=9, warmup=3), *_VECTORISED, _SPARK, _SPARK_IN_HEAP, "floor")
    yield Measurement("jobs", "job-b", question, entries, 8.5, 2, _SPARK, memory_gb=8, targets=targets)


def _by_key() -> Iterable[Measurement]:
    by_pandas = DropIn(batches=12, warmup=6)
    processor = ByProcessor(rows=20_000, batches=12, warmup=6)
    pandas = (*_PANDAS, "holdfast-memory")
    frames = ("holdfast-memory-pandas", "holdfast-rocksdb-pandas")
    for name, what, minutes, job, ours, baseline, target in (
        ("by-key-pandas", "function of applyInPandasWithState", 8, by_pandas, pandas, _SPARK_BY_KEY, 12.0),
        ("processor-row", "processor of transformWithState by Row", 4, processor, _BY_ROW, "spark-tws-row", 9.0),
        ("processor-pandas", "processor of transformWithStateInPandas", 7, processor, frames, "spark-tws-pandas", 12.0),
    ):
        question = f"How fast is a {what}, unchanged?"
        entries, targets = _same(job, *ours, baseline), (Target(f"{ours[0]}/{baseline}", at_least=target),)
        yield Measurement("jobs", name, question, entries, minutes, repeats=2, baseline=baseline, targets=targets)


def _small_batches() -> Iterable[Measurement]:
    for name, what, partitions, batches, warmup, minutes, turns, target in (
        ("small-batch", "does a micro-batch of 1,000 rows cost", 2, 60, 35, 4.5, 2, 1.0),
        ("shards-64", "do 64 shards cost in a micro-batch of 1,000 rows", 64, 5, 2, 3.0, 1, 1.5),
        ("shards-200", "do 200 shards cost in a micro-batch of 1,000 rows", 200, 4, 1, 6.0, 1, 1.5),
    ):
        job = JobA(rows=1000, batches=batches, warmup=warmup, partitions=partitions)
        entries = _same(job, "holdfast-memory", _SPARK_IN_PYTHON, _SPARK)
        targets = (Target(f"holdfast-memory/{_SPARK_IN_PYTHON}", at_least=target),)
        yield Measurement("jobs", name, f"What {what}?", entries, minutes, turns, _SPARK_IN_PYTHON, targets=targets)


def micro(profile: Profile) -> list[Measurement]:
    """Single operations of a backend, and single steps of a shard call, by pytest-benchmark."""
    if profile.quick:
        return []
    store = "What does an operation of the store cost, by size, width, hit rate and batch size?"
    steps = "What do the steps of a vectorised shard call cost?"
    return [
        Measurement("micro", "store", store, {}, 3.0, micro="store", memory_gb=2),
        Measurement("micro", "steps", steps, {}, 0.5, micro="steps", memory_gb=2),
    ]


def durability(profile: Profile) -> list[Measurement]:
    """The cost of durable state; a quick run measures only the wait for the user's own remote store."""
    shape = profile.shape
    if profile.quick:
        own = JobA(rows=shape.rows, keys=shape.keys, partitions=shape.shards, batches=4, warmup=2)
        fits = shape.store_latency_ms and shape.shards <= _QUICK_SHARDS_MAX
        question = "What does it cost to wait for your store at each commit?"
        return [_waiting("waiting", question, own, [shape.store_latency_ms], 1, along="")] if fits else []
    return [
        _uploads("a", JobA(batches=24, warmup=9, snapshot_commits=5), 2),
        _uploads("b", JobB(keys=1_000_000, batches=24, warmup=9, snapshot_commits=5), 2.5),
        _snapshots(),
        _restores(),
        _requests(),
        _waiting("waiting-a", _WAIT.format("A"), JobA(batches=8, warmup=2), [0, 20, 100], 2),
        _waiting("waiting-b", _WAIT.format("B"), JobB(keys=1_000_000, batches=16, warmup=4), [0, 20, 100], 2.5),
        _more_slots(),
    ]


_WAIT = "What does it cost job {} to wait for a distant store at each commit?"


def _uploads(letter: str, job: JobA | JobB, minutes: float) -> Measurement:
    question = f"How much slower is job {letter.upper()} while snapshots are uploaded?"
    jobs = {"with snapshots": job, "without": job.without_snapshots()}
    entries = {label: Entry("holdfast-rocksdb", of) for label, of in jobs.items()}
    targets = (Target("with snapshots/without", at_least=0.95), Target("longest with snapshots", at_most=2.0))
    name = f"uploads-{letter}"
    return Measurement("durability", name, question, entries, minutes, baseline="without", targets=targets)


def _snapshots() -> Measurement:
    question = "How many bytes does a snapshot upload after 0.1, 1 or 10 % of a million keys have changed?"
    entries = {
        # So little memory makes the rocksdb backend move rows into databases.
        f"store-{on}, {rows:,} keys": Entry(f"store-{on}", Snapshots(rows, 1_000_000, 24, 8, memory_mb=64))
        for on in ("memory", "rocksdb")
        for rows in (1_000, 10_000, 100_000)
    }
    return Measurement("durability", "snapshots", question, entries, 1.5, along="rows")


def _restores() -> Measurement:
    question = "How long does a restore of 1 GB from S3 take, relative to a plain download of the same objects?"
    entries = _same(Restore(batches=3, state_dir=f"s3://{BUCKET}/bench", serves=True), *_STORES)
    targets = tuple(Target(f"restore {name}", at_most=1.5) for name in _STORES)
    return Measurement("durability", "restore", question, entries, 3.5, targets=targets, memory_gb=7, disk_gb=6)


def _requests() -> Measurement:
    # With 350 rows, each shard stores a commit every fourth micro-batch, however many shards there are.
    question = "How many requests does a micro-batch make with 8, 64 and 200 shards, 350 rows each?"
    sizes = {8: JobA(batches=18, warmup=2), 64: JobA(batches=14, warmup=2), 200: JobA(batches=10, warmup=2)}
    entries = {
        f"{n} shards": Entry("holdfast-memory-s3", replace(job, rows=350 * n, partitions=n, plain_files=True))
        for n, job in sizes.items()
    }
    return Measurement("durability", "requests", question, entries, 3.5, along="partitions")


def _waiting(
    name: str, question: str, job: JobA | JobB, latencies_ms: list[float], minutes: float, along: str = "latency_ms"
) -> Measurement:
    far = {f"S3, {ms:g} ms": Entry("holdfast-memory-s3", replace(job, latency_ms=float(ms))) for ms in latencies_ms}
    entries = {**far, _LOCAL: Entry("holdfast-memory", job)}
    return Measurement("durability", name, question, entries, minutes, baseline=_LOCAL, along=along)


def _more_slots() -> Measurement:
    question = "Do twice as many task slots as cores hide the wait of 64 shards for a store at 100 ms?"
    near = JobA(partitions=64, batches=4, warmup=1)
    far = replace(near, latency_ms=100.0)
    entries = {
        "100 ms, 2 slots": Entry("holdfast-memory-s3", far),
        "100 ms, 4 slots": Entry("holdfast-memory-s3", replace(far, slots=4)),
        "0 ms, 2 slots": Entry("holdfast-memory-s3", near),
        _LOCAL: Entry("holdfast-memory", near),
    }
    return Measurement("durability", "waiting-64-shards", question, entries, 2.5, baseline=_LOCAL)


def growth(profile: Profile) -> list[Measurement]:
    """Throughput, memory, bytes and restores as state, micro-batches and shards grow."""
    return [] if profile.quick else [*_more_keys(), *_more_of_job_a()]


def _more_keys() -> Iterable[Measurement]:
    sizes = (100_000, 1_000_000, 10_000_000)
    question = "How fast is job B as its state grows from 100,000 to 10 million keys?"
    jobs = {keys: JobB(keys=keys, fill_rows=min(keys, 1_000_000), batches=8, warmup=2) for keys in sizes}
    entries = {f"{on}, {n:,} keys": Entry(on, job) for n, job in jobs.items() for on in (*_VECTORISED, _SPARK)}
    most = f", {sizes[-1]:,} keys"
    targets = tuple(
        Target(f"{on}{most}/{_SPARK}{most}", at_least=least)
        for on, least in zip(_VECTORISED, (2.1, 2.2, 1.5), strict=True)
    )
    yield Measurement("growth", "keys", question, entries, 8.5, along="keys", targets=targets, memory_gb=14, disk_gb=12)
    # Not on memory: two versions of 6.6 GB and their merges leave too little of 24 GB of RAM for everything else.
    largest = [(name, 50_000_000) for name in _STORES if name != "store-memory"]
    question = "What do micro-batches, snapshots and restores of one shard cost, up to 50 million keys?"
    asked = [*((name, keys) for name in _STORES for keys in sizes), *largest]
    entries = {f"{name}, {keys:,} keys": Entry(name, Size(keys=keys)) for name, keys in asked}
    yield Measurement("growth", "keys-store", question, entries, 6, along="keys", memory_gb=12, disk_gb=24)


def _more_of_job_a() -> Iterable[Measurement]:
    question = "How does throughput depend on the rows of a micro-batch, from 1,000 to a million?"
    entries = {
        f"{engine}, {rows:,} rows": Entry(engine, JobA(rows=rows, batches=batches, warmup=warmup))
        for rows, batches, warmup in ((1_000, 20, 10), (10_000, 16, 8), (100_000, 12, 6), (1_000_000, 5, 2))
        for engine in ("holdfast-filesystem", _SPARK)
    }
    yield Measurement("growth", "rows", question, entries, 2, along="rows")
    question = "What does the number of shards cost, from 2 to 200, with 10,000 rows a micro-batch?"
    sizes = {n: JobA(batches=batches, warmup=1) for n, batches in ((2, 12), (16, 8), (64, 4), (200, 3))}
    entries = {
        f"{engine}, {n} shards": Entry(engine, replace(job, rows=10_000, partitions=n, plain_files=True))
        for n, job in sizes.items()
        for engine in ("holdfast-memory", _SPARK)
    }
    yield Measurement("growth", "shards", question, entries, 2.5, along="partitions")
    question = "How much faster is job A on a cluster of two executors with a core each than on one?"
    job = JobA(rows=500_000, batches=8, warmup=3)
    entries = {f"{n} executors": Entry("holdfast-memory", replace(job, executors=n)) for n in (2, 1)}
    yield Measurement("growth", "executors", question, entries, 1, baseline="1 executors", along="executors")


def nexmark(profile: Profile) -> list[Measurement]:
    """Each query by operators in one line and on Spark, whose results must agree; two of them also by key."""
    from pyspark.sql import GroupedData

    found = []
    for number in ["5"] if profile.quick else QUERIES:
        query = QUERIES[number]
        job = Nexmark(query=number, batches=6, warmup=3) if profile.quick else Nexmark(query=number)
        by_key = [] if query.by_key is None else ["nexmark-memory-by-key"]
        # Spark 4.0 lacks `transformWithState` by Row, needed for queries that its own operators cannot express.
        is_on_spark = not by_key or hasattr(GroupedData, "transformWithState")
        engines, baseline = (NEXMARK, NEXMARK_ON_SPARK) if is_on_spark else (NEXMARK[:-1], "")
        name, question = f"query-{int(number):02}", f"Nexmark {number}, {query.title}: how fast is it?"
        minutes, check = 1.5 if profile.quick else 2.9, partial(checked, job, [*engines, *by_key])
        entries = _same(job, *engines, *by_key)
        found.append(Measurement("nexmark", name, question, entries, minutes, baseline=baseline, check=check))
    return found


# The throughput to reach relative to Spark's, on memory and rocksdb, by rows per micro-batch.
_AS_ROWS = {1_000: (1.0, 0.9), 10_000: (1.3, 1.2), 200_000: (2.5, 2.0)}
_OUTER_JOIN = {10_000: (1.5, 1.3), 200_000: (5.0, 4.0)}
_OPERATORS: tuple[tuple[str, str, dict[int, tuple[float, float]]], ...] = (
    ("dedup", "dropDuplicatesWithinWatermark, each id twice", _AS_ROWS),
    ("window", "a count by window, about as many keys as rows", _AS_ROWS),
    ("session", "a count by session of 200,000 keys", {1_000: (1.0, 0.9), 10_000: (1.5, 1.3), 200_000: (7.0, 5.0)}),
    ("agg", "a running count and sum of 200,000 keys", {1_000: (0.9, 0.9), 10_000: (1.0, 1.0), 200_000: (2.0, 2.0)}),
    ("join", "an inner join within two seconds", {1_000: (1.2, 1.1), 10_000: (1.8, 1.6), 200_000: (8.0, 6.0)}),
    ("left_join", "the same left outer join", _OUTER_JOIN),
    ("full_join", "the same full outer join", _OUTER_JOIN),
)


def operators(profile: Profile) -> list[Measurement]:
    """Operators in one line, against Spark's own, which must emit the same rows."""
    return [] if profile.quick else [_operator(*of) for of in _OPERATORS]


def _operator(name: str, title: str, wanted: Mapping[int, tuple[float, float]]) -> Measurement:
    ours, theirs = ("operator-memory", "operator-rocksdb"), "spark-operator"
    small = Operators(operator=name)
    jobs = {n: replace(small, rows=n) for n in wanted} | {200_000: replace(small, rows=200_000, batches=8, warmup=4)}
    entries = {f"{on}, {n:,} rows": Entry(on, job) for n, job in jobs.items() for on in (*ours, theirs)}
    targets = tuple(
        Target(f"{on}, {n:,} rows/{theirs}, {n:,} rows", at_least=least)
        for n, of in wanted.items()
        for on, least in zip(ours, of, strict=True)
    )
    about: dict[str, Any] = {"baseline": theirs, "along": "rows", "targets": targets}
    check = partial(checked, small, [*ours, theirs])
    return Measurement("operators", name, f"How fast is {title}?", entries, 2 * len(jobs), check=check, **about)


def peers(profile: Profile) -> list[Measurement]:
    """Other stream processors on the same files: Flink, Pathway, Bytewax and Quix Streams."""
    return [] if profile.quick else [_from_files(), _from_files_by_key()]


_INSTALLS = "The first run installs the peers from PyPI into separate environments: 2.6 GB in the cache."


def _from_files() -> Measurement:
    question = "How fast is a running count and sum from files, compared with other stream processors?"
    entries = _same(FromFiles(), *_VECTORISED, _SPARK, *_PEER_QUERIES, "floor")
    targets = (Target(f"holdfast-rocksdb/{_FLINK}", at_least=5.0), Target("holdfast-memory/pathway", at_least=2.0))
    note = (
        f"{_INSTALLS} Pathway persists its input: persisting operators needs a licence key. It takes all files as one "
        "piece and writes one result per key; with a backlog it works in pieces."
    )
    about: dict[str, Any] = {"baseline": _FLINK, "targets": targets, "note": note, "check": _installed}
    return Measurement("peers", "from-files", question, entries, 9, **about)


def _from_files_by_key() -> Measurement:
    question = "How fast is the same as a Python function per key, with a tenth of the rows and keys?"
    job = FromFiles(rows=100_000, keys=100_000, batches=6, warmup=2)
    entries = _same(job, *_BY_ROW, *_PANDAS, *_PEER_FUNCTIONS)
    note = (
        f"{_INSTALLS} Of Quix Streams only the state store is measured, in process: without Kafka, it has no consumer, "
        "producer or changelog, and survives a kill of the process, but not the loss of its disk."
    )
    about: dict[str, Any] = {"baseline": "flink-process-rocksdb", "note": note, "check": _installed}
    return Measurement("peers", "from-files-by-key", question, entries, 7, **about)


def _installed() -> dict[str, Any]:
    """Install every peer before the runs, each of which verifies its own result."""
    for environment in ENVIRONMENTS:
        environment.install()
    return {}


SUITES: Mapping[str, Callable[[Profile], Iterable[Measurement]]] = {
    own_load.SUITE: own_load.measurements,
    **{suite.__name__: suite for suite in (jobs, operators, micro, durability, growth, nexmark, peers)},
}
