"""What durable state costs: uploads beside a job, bytes, requests, restores, and the wait for a distant store."""

from __future__ import annotations

from dataclasses import replace

from holdfast.benches.instruments.object_store import BUCKET
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.requests import DurableA, DurableB, DurableJob, Requests
from holdfast.benches.jobs.store.snapshots import Restore, Snapshots
from holdfast.benches.report.results import WITH_SNAPSHOTS, WITHOUT
from holdfast.benches.runs.paired import Entry
from holdfast.benches.suites.measurement import Measurement, Profile, Shape

SUITE = "durability"
_LOCAL = "local disk"
_LATENCIES_MS = (0, 20, 100)
_BACKENDS = ("memory", "filesystem", "rocksdb")
# So that each shard stores a commit every fourth micro-batch, however many shards there are.
_ROWS_OF_A_SHARD = 350
# Of a quick run's shards: more take longer than the minute.
_QUICK_SHARDS_MAX = 16


def measurements(profile: Profile) -> list[Measurement]:
    """Return the questions of this suite."""
    if profile.quick:
        shape = profile.shape
        return [_at_a_distance(shape)] if shape.store_latency_ms and shape.shards <= _QUICK_SHARDS_MAX else []
    return [
        _uploads("a", JobA(batches=20, warmup=4, snapshot_commits=5), minutes=2),
        _uploads("b", JobB(keys=1_000_000, batches=20, warmup=4, snapshot_commits=5), minutes=2.5),
        _change_rates(),
        _restore(),
        _requests(),
        _waiting("a", DurableA(batches=8, warmup=2), minutes=2),
        _waiting("b", DurableB(keys=1_000_000, batches=16, warmup=4), minutes=2.5),
        _more_slots(),
    ]


def _uploads(letter: str, job: JobA | JobB, minutes: float) -> Measurement:
    return Measurement(
        suite=SUITE,
        name=f"uploads-{letter}",
        question=f"How much slower is job {letter.upper()} while snapshots are uploaded beside it?",
        entries={
            WITH_SNAPSHOTS: Entry("holdfast-rocksdb", job),
            WITHOUT: Entry("holdfast-rocksdb", job.without_snapshots()),
        },
        minutes=minutes,
        baseline=WITHOUT,
    )


def _change_rates() -> Measurement:
    keys = 1_000_000
    changed = [keys // 1000, keys // 100, keys // 10]
    return Measurement(
        suite=SUITE,
        name="snapshots",
        question="How many bytes does a snapshot send when 0.1, 1 or 10 % of a million keys have changed?",
        entries={
            f"store-{backend}, {rows:,} keys": Entry(
                f"store-{backend}", Snapshots(rows=rows, keys=keys, batches=24, warmup=8)
            )
            for backend in ("memory", "rocksdb")
            for rows in changed
        },
        minutes=1.5,
        along="rows",
    )


def _restore() -> Measurement:
    job = Restore(batches=3, state_dir=f"s3://{BUCKET}/bench", serves=True)
    return Measurement(
        suite=SUITE,
        name="restore",
        question="How long does it take to restore 1 GB from S3, by a plain download of the same objects?",
        entries={f"store-{backend}": Entry(f"store-{backend}", job) for backend in _BACKENDS},
        minutes=3.5,
        memory_gb=7,
        disk_gb=6,
    )


def _requests() -> Measurement:
    entries = {
        f"{shards} shards": Entry(
            "holdfast-memory-s3",
            Requests(partitions=shards, rows=_ROWS_OF_A_SHARD * shards, batches=batches, warmup=2, plain_files=True),
        )
        for shards, batches in ((8, 18), (64, 14), (200, 10))
    }
    return Measurement(
        suite=SUITE,
        name="requests",
        question=f"How many requests does a micro-batch make with 8, 64 and 200 shards, {_ROWS_OF_A_SHARD} rows each?",
        entries=entries,
        minutes=3.5,
        along="partitions",
    )


def _waiting(letter: str, job: DurableJob, minutes: float) -> Measurement:
    distances = {
        f"S3, {latency_ms} ms": Entry("holdfast-memory-s3", replace(job, latency_ms=float(latency_ms)))
        for latency_ms in _LATENCIES_MS
    }
    return Measurement(
        suite=SUITE,
        name=f"waiting-{letter}",
        question=f"What does it cost job {letter.upper()} that commits wait for a store that is so far away?",
        entries={**distances, _LOCAL: Entry("holdfast-memory", job)},
        minutes=minutes,
        baseline=_LOCAL,
        along="latency_ms",
        profile=True,
    )


def _more_slots() -> Measurement:
    near = DurableA(partitions=64, batches=4, warmup=1)
    far = replace(near, latency_ms=100.0)
    return Measurement(
        suite=SUITE,
        name="waiting-64-shards",
        question="Do twice as many task slots as cores hide the wait of 64 shards for a store at 100 ms?",
        entries={
            "100 ms, 2 slots": Entry("holdfast-memory-s3", far),
            "100 ms, 4 slots": Entry("holdfast-memory-s3", replace(far, slots=4)),
            "0 ms, 2 slots": Entry("holdfast-memory-s3", near),
            _LOCAL: Entry("holdfast-memory", near),
        },
        minutes=2.5,
        baseline=_LOCAL,
        profile=True,
    )


def _at_a_distance(shape: Shape) -> Measurement:
    """Return the question for the user's own store; two runs, which end within a minute."""
    job = DurableA(
        rows=shape.rows,
        keys=shape.keys,
        partitions=shape.shards,
        batches=4,
        warmup=2,
        latency_ms=shape.store_latency_ms,
    )
    far = f"S3, {shape.store_latency_ms:g} ms"
    return Measurement(
        suite=SUITE,
        name="waiting",
        question="What does it cost that each commit waits until your store has it?",
        entries={far: Entry("holdfast-memory-s3", job), _LOCAL: Entry("holdfast-memory", job)},
        minutes=1,
        baseline=_LOCAL,
        profile=True,
    )
