"""What becomes of throughput, memory, bytes and restores as state, micro-batches, shards and executors grow."""

from __future__ import annotations

from holdfast.benches.jobs.job_a import JobA, JobAOnCluster
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.store.snapshots import Size
from holdfast.benches.runs.paired import Entry
from holdfast.benches.suites.measurement import Measurement, Profile

SUITE = "growth"
_SPARK = "spark-agg-rocksdb"
_FILL_ROWS = 1_000_000
_SMALL, _LARGE, _LARGEST = (100_000, 1_000_000), 10_000_000, 50_000_000


def measurements(profile: Profile) -> list[Measurement]:
    """Return the questions of this suite; a quick run has none."""
    return [] if profile.quick else [_keys(), _keys_in_the_store(), _rows(), _shards(), _executors()]


def _keys() -> Measurement:
    engines = [f"holdfast-{backend}" for backend in ("memory", "filesystem", "rocksdb")] + [_SPARK]
    return Measurement(
        suite=SUITE,
        name="keys",
        question="How fast is job B as its state grows from 100,000 to 10 million keys?",
        entries={
            f"{engine}, {keys:,} keys": Entry(
                engine, JobB(keys=keys, fill_rows=min(keys, _FILL_ROWS), batches=8, warmup=2)
            )
            for keys in (*_SMALL, _LARGE)
            for engine in engines
        },
        minutes=8.5,
        along="keys",
        memory_gb=14,
        disk_gb=12,
    )


def _keys_in_the_store() -> Measurement:
    """Return the question for the store alone, which reaches 50 million keys in the time.

    Not on `memory`: two versions of 6.6 GB, and what merges need, leave 24 GB of RAM too little for everything else.
    """
    sizes = {backend: [*_SMALL, _LARGE, _LARGEST] for backend in ("filesystem", "rocksdb")}
    sizes = {"memory": [*_SMALL, _LARGE], **sizes}
    return Measurement(
        suite=SUITE,
        name="keys-store",
        question="What do micro-batches, memory, snapshots and restores of one shard take, up to 50 million keys?",
        entries={
            f"store-{backend}, {keys:,} keys": Entry(f"store-{backend}", Size(keys=keys))
            for backend, of in sizes.items()
            for keys in of
        },
        minutes=6,
        along="keys",
        memory_gb=12,
        disk_gb=24,
    )


def _rows() -> Measurement:
    return Measurement(
        suite=SUITE,
        name="rows",
        question="How does throughput depend on the rows of a micro-batch, from 1,000 to a million?",
        entries={
            f"{engine}, {rows:,} rows": Entry(engine, JobA(rows=rows, batches=batches, warmup=warmup))
            for rows, batches, warmup in ((1_000, 20, 10), (10_000, 16, 8), (100_000, 12, 6), (1_000_000, 5, 2))
            for engine in ("holdfast-filesystem", _SPARK)
        },
        minutes=2,
        along="rows",
    )


def _shards() -> Measurement:
    return Measurement(
        suite=SUITE,
        name="shards",
        question="What does the number of shards cost, from 2 to 200, with 10,000 rows a micro-batch?",
        entries={
            f"{engine}, {shards} shards": Entry(
                engine, JobA(rows=10_000, partitions=shards, batches=batches, warmup=1, plain_files=True)
            )
            for shards, batches in ((2, 12), (16, 8), (64, 4), (200, 3))
            for engine in ("holdfast-memory", _SPARK)
        },
        minutes=2.5,
        along="partitions",
    )


def _executors() -> Measurement:
    return Measurement(
        suite=SUITE,
        name="executors",
        question="How much faster is job A on a cluster of two executors with a core each than on one?",
        entries={
            f"{executors} executors": Entry(
                "holdfast-memory-cluster", JobAOnCluster(executors=executors, rows=500_000, batches=8, warmup=3)
            )
            for executors in (2, 1)
        },
        minutes=1,
        baseline="1 executors",
        along="executors",
    )
