"""The user's own load on each backend and on Spark, in as many micro-batches as fit into ten minutes.

::

    one run:   start of Spark │ filling the state │ warm-up │ counted micro-batches
                     18 s         keys * fill_us      8 s         as many as fit

The time of a run is estimated from runs on two cores (benches/RESULTS.md, job B): fixed costs per micro-batch and
task, and costs per key and row that grow with the width of the state. If the estimate is too low, later turns are left
out: it decides only how much is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.runs.engines import ENGINES
from holdfast.benches.runs.paired import Entry
from holdfast.benches.suites.measurement import Measurement, Profile, Shape
from holdfast.errors import InvalidArgumentError

SUITE, BASELINE = "own-load", "spark-agg-rocksdb"
_WITHIN_S = 500.0
_START_S, _WARM_UP_S, _BATCH_S = 18.0, 8.0, 0.25
_SLOTS = 2
# Sequential requests of a commit.
_REQUESTS = 3
# Costs were measured with 92 bytes of values and 16 of key. Half of a cost does not depend on that width.
_WIDTH = 108
_FILL_ROWS, _FILL_BYTES = 1_000_000, 160 << 20
_BATCH_BYTES_MAX = 512 << 20
# Turns, and the minimum of counted micro-batches in each; fewer are enough if they are long.
_TURNS = ((3, 12), (2, 8), (1, 4))
_LONG_S, _COUNTED_LONG = 10.0, 2
_COUNTED_MAX = 40
# For several versions and the overhead of keys; doubled on disk, which also has Spark's checkpoint.
_STATE_FACTOR, _KEY_BYTES = 3.0, 40
_KEYS_MIN = 100_000

# Estimated costs of an engine: µs per new key, µs per row of a counted micro-batch, s per empty task.
_COSTS = {
    "holdfast-memory": (5, 10, 0.25),
    "holdfast-filesystem": (6, 11, 0.25),
    "holdfast-rocksdb": (14, 18, 0.25),
    BASELINE: (10, 20, 0.15),
}


@dataclass(frozen=True)
class _Plan:
    """A load, and the turns that measure it."""

    shape: Shape
    turns: int

    @property
    def batch_s(self) -> float:
        """The time of a micro-batch, summed over all engines."""
        return sum(self.parts_s(engine)[1] for engine in _COSTS)

    @property
    def warmup(self) -> int:
        return min(20, max(1, round(_WARM_UP_S * len(_COSTS) / self.batch_s)))

    @property
    def counted(self) -> int:
        left_s = _WITHIN_S / self.turns - sum(self.run_s(engine, self.warmup) for engine in _COSTS)
        return min(_COUNTED_MAX, int(left_s / self.batch_s))

    def parts_s(self, engine: str) -> tuple[float, float]:
        """Return the time to fill the state, and the time of a micro-batch."""
        (fill_us, row_us, task_s), shape = _COSTS[engine], self.shape
        wide = 0.5 + 0.5 * (shape.value_bytes + 16) / _WIDTH
        waits_s = 0.0 if engine == BASELINE else _REQUESTS * shape.store_latency_ms / 1000
        fixed_s = _BATCH_S + (task_s + waits_s) * shape.shards / _SLOTS
        fill_s = -(-shape.keys // _fill_rows(shape)) * fixed_s + shape.keys * fill_us * wide / 1e6
        return fill_s, fixed_s + shape.rows * row_us * wide / 1e6

    def run_s(self, engine: str, batches: int) -> float:
        fill_s, batch_s = self.parts_s(engine)
        return _START_S + fill_s + batches * batch_s


def measurements(profile: Profile) -> list[Measurement]:
    """Return the suite's only measurement in a quick run; refuse a load that does not fit into ten minutes."""
    return [_measurement(profile.shape)] if profile.quick else []


def _measurement(asked: Shape) -> Measurement:
    _require_possible(asked)
    plan = _fitting(asked)
    shape, batches = plan.shape, plan.warmup + plan.counted
    job = JobB(
        rows=shape.rows,
        keys=shape.keys,
        value_bytes=shape.value_bytes,
        partitions=shape.shards,
        fill_rows=_fill_rows(shape),
        warmup=plan.warmup,
        batches=batches,
        latency_ms=shape.store_latency_ms,
    )
    state_gb = shape.keys * (shape.value_bytes + _KEY_BYTES) * _STATE_FACTOR / 2**30
    return Measurement(
        suite=SUITE,
        name=SUITE,
        question="Which backend suits your own load?",
        entries={engine: Entry(_engine(engine, shape), job) for engine in _COSTS},
        minutes=plan.turns * sum(plan.run_s(engine, batches) for engine in _COSTS) / 60,
        repeats=plan.turns,
        baseline=BASELINE,
        note=" ".join(_notes(asked, plan)),
        memory_gb=5 + state_gb,
        disk_gb=2 + 2 * state_gb,
    )


def _require_possible(shape: Shape) -> None:
    width = shape.rows * (shape.value_bytes + _KEY_BYTES)
    if width > _BATCH_BYTES_MAX:
        raise InvalidArgumentError(
            "a micro-batch of this load is larger than a quick run measures; reduce --rows-per-batch or --value-bytes",
            rows_per_batch=shape.rows,
            value_bytes=shape.value_bytes,
            batch_mib=width >> 20,
            at_most_mib=_BATCH_BYTES_MAX >> 20,
        )


def _fitting(shape: Shape) -> _Plan:
    """Return the plan with the most turns that fit, each with enough micro-batches; if none fits, with fewer keys."""
    for turns, least in _TURNS:
        if _Plan(shape, turns).counted >= least:
            return _Plan(shape, turns)
    turns, least = _TURNS[-1]
    plan = _Plan(shape, turns)
    if plan.batch_s / len(_COSTS) > _LONG_S:
        least = _COUNTED_LONG
    low, high = min(shape.keys, _KEYS_MIN), shape.keys
    if plan.counted >= least:
        low = high
    elif _Plan(replace(shape, keys=low), turns).counted < least:
        raise InvalidArgumentError(
            "this load does not fit into ten minutes: its micro-batches alone take too long; give fewer shards or "
            "rows, or measure it with `holdfast bench job-b`",
            shards=shape.shards,
            rows_per_batch=shape.rows,
            batch_s=round(max(plan.parts_s(engine)[1] for engine in _COSTS)),
        )
    while high - low > shape.keys // 100:
        middle = (low + high) // 2
        fits = _Plan(replace(shape, keys=middle), turns).counted >= least
        low, high = (middle, high) if fits else (low, middle)
    return _Plan(replace(shape, keys=low), turns)


def _fill_rows(shape: Shape) -> int:
    return max(1_000, min(_FILL_ROWS, shape.keys, _FILL_BYTES // (shape.value_bytes + _KEY_BYTES)))


def _engine(engine: str, shape: Shape) -> str:
    """Return the engine, or its variant that commits to the delayed storage; Spark commits to local disk."""
    delayed = f"{engine}-s3"
    return delayed if shape.store_latency_ms and delayed in ENGINES else engine


def _notes(asked: Shape, plan: _Plan) -> list[str]:
    shape, warmup, counted = plan.shape, plan.warmup, plan.counted
    lines = []
    if shape.keys < asked.keys:
        lines.append(
            f"Measured with {shape.keys:,} keys, not {asked.keys:,}: ten minutes are too short to fill the state with "
            "all of them. This run does not show whether they fit into memory; the suite growth does."
        )
    if shape.store_latency_ms:
        lines.append(
            f"holdfast commits to an S3 server that answers {shape.store_latency_ms:g} ms late; Spark's checkpoint is "
            "on local disk."
        )
    runs = [
        f"{engine} {plan.run_s(engine, warmup + counted):.0f} (fill {plan.parts_s(engine)[0]:.0f})" for engine in _COSTS
    ]
    lines.append(
        f"Warm-up micro-batches: {warmup}, counted: {counted}, turns: {plan.turns}. Estimated seconds per run: "
        f"{'; '.join(runs)}, of which {_START_S:.0f} start Spark."
    )
    return lines
