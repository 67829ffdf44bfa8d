"""The user's own load on each backend and on Spark's, in as many micro-batches as ten minutes have room for.

::

    one run:   start of Spark │ filling the state │ warm-up │ counted micro-batches
                     18 s         keys * fill_us      8 s         as many as fit

What a run costs is a guess from measured runs on two cores (benches/RESULTS.md, job B): fixed costs of a micro-batch
and of each of its tasks, and costs by key and by row that grow with the width of the state. Where the guess is too low,
the later turns are left out; so it decides how much is measured, never what.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.benches.jobs.by_name import read_job
from holdfast.benches.jobs.job import SparkJob
from holdfast.benches.runs.engines import ENGINES
from holdfast.benches.runs.paired import Entry
from holdfast.benches.suites.measurement import Measurement, Profile, Shape
from holdfast.errors import InvalidArgumentError

BASELINE = "spark-agg-rocksdb"
_WITHIN_S = 500.0
_START_S = 18.0
_WARM_UP_S = 8.0
_BATCH_S = 0.25
_SLOTS = 2
# Requests that a commit waits for, one after another.
_REQUESTS = 3
# The width at which costs were measured: 92 bytes of values and 16 of key. Half of a cost does not depend on it.
_WIDTH = 108
_FILL_ROWS, _FILL_BYTES = 1_000_000, 160 << 20
_BATCH_BYTES_MAX = 512 << 20
# Turns, and the counted micro-batches that each must have to be worth its start; a few do where they are long.
_TURNS = ((3, 12), (2, 8), (1, 4))
_LONG_S, _COUNTED_LONG = 10.0, 2
_COUNTED_MAX = 40
# Versions beside one another and the overhead of keys; twice on disk, where Spark's checkpoint is too.
_STATE_FACTOR, _KEY_BYTES = 3.0, 40
_KEYS_MIN = 100_000


@dataclass(frozen=True)
class Cost:
    """What an engine takes, at a guess.

    Attributes
    ----------
    fill_us, row_us : float
        For a new key, and for a row of a counted micro-batch.
    task_s : float
        For a task that does nothing.
    """

    fill_us: float
    row_us: float
    task_s: float


_COSTS = {
    "holdfast-memory": Cost(5, 10, 0.25),
    "holdfast-filesystem": Cost(6, 11, 0.25),
    "holdfast-rocksdb": Cost(14, 18, 0.25),
    BASELINE: Cost(10, 20, 0.15),
}


@dataclass(frozen=True)
class Parts:
    """The seconds of one run."""

    fill_s: float
    batch_s: float

    def run_s(self, batches: int) -> float:
        """Return what a run of so many micro-batches takes, besides those that fill the state."""
        return _START_S + self.fill_s + batches * self.batch_s


def measurements(profile: Profile) -> list[Measurement]:
    """Return the one question of this suite, in a quick run.

    Raises
    ------
    InvalidArgumentError
        Ten minutes have no room for a load of this shape, nor for one with fewer keys.
    """
    return [_measurement(profile.shape)] if profile.quick else []


def _measurement(asked: Shape) -> Measurement:
    _require_possible(asked)
    shape, turns, warmup, counted = _fitting(asked)
    job = _job(shape, warmup, counted)
    parts = {engine: _parts(engine, shape) for engine in _COSTS}
    seconds = turns * sum(one.run_s(warmup + counted) for one in parts.values())
    state_gb = shape.keys * (shape.value_bytes + _KEY_BYTES) * _STATE_FACTOR / 2**30
    return Measurement(
        suite="own-load",
        name="own-load",
        question="Which backend suits your own load?",
        entries={engine: Entry(_engine(engine, shape), job) for engine in parts},
        minutes=seconds / 60,
        repeats=turns,
        baseline=BASELINE,
        note=_note(asked, shape, parts, warmup, counted, turns),
        memory_gb=5 + state_gb,
        disk_gb=2 + 2 * state_gb,
    )


def _require_possible(shape: Shape) -> None:
    width = shape.rows * (shape.value_bytes + _KEY_BYTES)
    if width > _BATCH_BYTES_MAX:
        raise InvalidArgumentError(
            "a micro-batch of this load is larger than a quick run measures; give fewer rows or fewer bytes of values",
            rows_per_batch=shape.rows,
            value_bytes=shape.value_bytes,
            batch_mib=width >> 20,
            at_most_mib=_BATCH_BYTES_MAX >> 20,
        )


def _fitting(shape: Shape) -> tuple[Shape, int, int, int]:
    """Return the shape, with fewer keys if needed; turns, warm-up and counted micro-batches of a run."""
    for turns, least in _TURNS:
        warmup, counted = _batches(shape, turns)
        if counted >= least:
            return shape, turns, warmup, counted
    turns, least = _TURNS[-1]
    if _mean_batch_s(shape) > _LONG_S:
        least = _COUNTED_LONG
    if _batches(shape, turns)[1] >= least:
        return (shape, turns, *_batches(shape, turns))
    smaller = _with_keys(shape, 0)
    if _batches(smaller, turns)[1] < least:
        raise InvalidArgumentError(
            "ten minutes have no room for this load: its micro-batches alone take too long; give fewer shards or rows, "
            "or measure it by `holdfast bench job-b`",
            shards=shape.shards,
            rows_per_batch=shape.rows,
            batch_s=round(max(_parts(engine, shape).batch_s for engine in _COSTS)),
        )
    low, high = smaller.keys, shape.keys
    while high - low > shape.keys // 100:
        middle = (low + high) // 2
        low, high = (middle, high) if _batches(_with_keys(shape, middle), turns)[1] >= least else (low, middle)
    smaller = _with_keys(shape, low)
    return (smaller, turns, *_batches(smaller, turns))


def _with_keys(shape: Shape, keys: int) -> Shape:
    return Shape(
        max(keys, min(shape.keys, _KEYS_MIN)), shape.rows, shape.value_bytes, shape.shards, shape.store_latency_ms
    )


def _batches(shape: Shape, turns: int) -> tuple[int, int]:
    """Return warm-up and counted micro-batches that a run has time for; as many on each engine."""
    parts = [_parts(engine, shape) for engine in _COSTS]
    batch_s = sum(one.batch_s for one in parts)
    warmup = min(20, max(1, round(_WARM_UP_S * len(parts) / batch_s)))
    left_s = _WITHIN_S / turns - sum(one.run_s(warmup) for one in parts)
    return warmup, min(_COUNTED_MAX, int(left_s / batch_s))


def _mean_batch_s(shape: Shape) -> float:
    return sum(_parts(engine, shape).batch_s for engine in _COSTS) / len(_COSTS)


def _parts(engine: str, shape: Shape) -> Parts:
    cost = _COSTS[engine]
    wide = 0.5 + 0.5 * (shape.value_bytes + 16) / _WIDTH
    waits_s = 0.0 if engine == BASELINE else _REQUESTS * shape.store_latency_ms / 1000
    fixed_s = _BATCH_S + (cost.task_s + waits_s) * shape.shards / _SLOTS
    fill_batches = -(-shape.keys // _fill_rows(shape))
    return Parts(
        fill_batches * fixed_s + shape.keys * cost.fill_us * wide / 1e6, fixed_s + shape.rows * cost.row_us * wide / 1e6
    )


def _fill_rows(shape: Shape) -> int:
    return max(1_000, min(_FILL_ROWS, shape.keys, _FILL_BYTES // (shape.value_bytes + _KEY_BYTES)))


def _job(shape: Shape, warmup: int, counted: int) -> SparkJob:
    sizes = {
        "rows": shape.rows,
        "keys": shape.keys,
        "value_bytes": shape.value_bytes,
        "partitions": shape.shards,
        "fill_rows": _fill_rows(shape),
        "warmup": warmup,
        "batches": warmup + counted,
    }
    name = "durable-b" if shape.store_latency_ms else "job-b"
    delay = {"latency_ms": shape.store_latency_ms} if shape.store_latency_ms else {}
    job = read_job({"name": name, **sizes, **delay})
    assert isinstance(job, SparkJob)
    return job


def _engine(engine: str, shape: Shape) -> str:
    """Return the engine itself, or the one whose commits go to the delayed storage; Spark's stay on local disk."""
    delayed = f"{engine}-s3"
    return delayed if shape.store_latency_ms and delayed in ENGINES else engine


def _note(asked: Shape, shape: Shape, parts: dict[str, Parts], warmup: int, counted: int, turns: int) -> str:
    lines = []
    if shape.keys < asked.keys:
        lines.append(
            f"Measured with {shape.keys:,} keys, not {asked.keys:,}: filling the state with all of them takes longer "
            "than ten minutes leave. Whether they fit in memory, this run does not say; the suite growth does."
        )
    if shape.store_latency_ms:
        lines.append(
            f"Commits of holdfast go to an S3 server that answers {shape.store_latency_ms:g} ms late; Spark's "
            "checkpoint stays on local disk."
        )
    lines.append(
        f"Micro-batches to warm up: {warmup}, that count: {counted}, turns: {turns}. Seconds of a run, at a guess: "
        + "; ".join(
            f"{engine} {one.run_s(warmup + counted):.0f} (start {_START_S:.0f}, fill {one.fill_s:.0f}, "
            f"warm-up {warmup * one.batch_s:.0f}, counted {counted * one.batch_s:.0f})"
            for engine, one in parts.items()
        )
        + "."
    )
    return " ".join(lines)
