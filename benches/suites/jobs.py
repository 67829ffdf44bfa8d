"""Jobs A and B on every backend, against Spark's aggregation and its Python state APIs.

Sizes are chosen so that the suite takes some 42 minutes on two idle cores: a JVM is warm after its warm-up, and what
disturbs one run shows between turns.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.benches.jobs.by_key import DropIn
from holdfast.benches.jobs.by_processor import ByProcessor
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.report.results import SPARK_BY_KEY
from holdfast.benches.runs.paired import Entry
from holdfast.benches.suites.measurement import Measurement, Profile

_BACKENDS = ("memory", "filesystem", "rocksdb")
_VECTORISED = tuple(f"holdfast-{backend}" for backend in _BACKENDS)
_SPARK, _SPARK_IN_HEAP, _SPARK_IN_PYTHON = "spark-agg-rocksdb", "spark-agg-hdfs", "spark-aiwps-count"


def measurements(profile: Profile) -> list[Measurement]:
    """Return the questions of this suite; none is quick."""
    return [] if profile.quick else [*_jobs(), *_by_key(), *_small()]


def _jobs() -> Iterable[Measurement]:
    yield Measurement(
        suite="jobs",
        name="job-a",
        question="How fast is a running count and sum, written vectorised?",
        entries=_entries(JobA(batches=6), *_VECTORISED, _SPARK, _SPARK_IN_HEAP, "floor"),
        minutes=9.5,
        repeats=3,
        baseline=_SPARK,
        memory_gb=8,
    )
    yield Measurement(
        suite="jobs",
        name="job-b",
        question="How fast are micro-batches that touch a few of 2 million keys?",
        entries=_entries(JobB(batches=9, warmup=3), *_VECTORISED, _SPARK, _SPARK_IN_HEAP),
        minutes=7.5,
        repeats=2,
        baseline=_SPARK,
        memory_gb=8,
    )


def _by_key() -> Iterable[Measurement]:
    pandas = tuple(f"pandas-{backend}" for backend in _BACKENDS)
    yield Measurement(
        suite="jobs",
        name="by-key-pandas",
        question="How fast is a function of applyInPandasWithState, unchanged?",
        entries=_entries(
            DropIn(rows=20_000, touched=10_000, batches=7, warmup=3), *pandas, "holdfast-memory", SPARK_BY_KEY
        ),
        minutes=5,
        repeats=2,
        baseline=SPARK_BY_KEY,
    )
    yield Measurement(
        suite="jobs",
        name="processor-row",
        question="How fast is a processor of transformWithState by Row, unchanged?",
        entries=_entries(
            ByProcessor(rows=20_000, batches=12, warmup=6), *(f"{name}-row" for name in _VECTORISED), "spark-tws-row"
        ),
        minutes=4,
        repeats=2,
        baseline="spark-tws-row",
    )
    yield Measurement(
        suite="jobs",
        name="processor-pandas",
        question="How fast is a processor of transformWithStateInPandas, unchanged?",
        entries=_entries(
            ByProcessor(rows=10_000, touched=10_000, batches=4, warmup=1),
            "holdfast-memory-pandas",
            "holdfast-rocksdb-pandas",
            "spark-tws-pandas",
        ),
        minutes=3,
        repeats=2,
        baseline="spark-tws-pandas",
    )


def _small() -> Iterable[Measurement]:
    against = ("holdfast-memory", _SPARK_IN_PYTHON, _SPARK)
    yield Measurement(
        suite="jobs",
        name="small-batch",
        question="What does a micro-batch of 1,000 rows cost?",
        entries=_entries(JobA(rows=1000, batches=60, warmup=35, transport="rows"), *against),
        minutes=4.5,
        repeats=2,
        baseline=_SPARK_IN_PYTHON,
    )
    for shards, batches, warmup, minutes in ((64, 5, 2, 3.0), (200, 4, 1, 6.0)):
        yield Measurement(
            suite="jobs",
            name=f"shards-{shards}",
            question=f"What do {shards} shards cost in a micro-batch of 1,000 rows?",
            entries=_entries(
                JobA(rows=1000, batches=batches, warmup=warmup, partitions=shards, transport="rows"), *against
            ),
            minutes=minutes,
            baseline=_SPARK_IN_PYTHON,
        )


def _entries(job: Job, *engines: str) -> dict[str, Entry]:
    return {engine: Entry(engine, job) for engine in engines}
