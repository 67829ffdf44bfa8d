"""Commits and uploads over time, and the growth of state: the charts of an operator.

Charts use the coordinates of an SVG drawing of width `WIDTH`, which the templates write; ticks are in percent of it.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.commands.target import moment, size
from holdfast.health import count, counted
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import StateSizes, list_shard
from holdfast.ui.survey import COMMIT, HOUR_MS, PART, SNAPSHOT, Column, OperatorSurvey, StoredObjects, spread

SHARDS_MAX = 32
SNAPSHOTS_MAX = 24
POINTS_MAX = 200
WIDTH, HEIGHT = 720, 64
BUCKETS = 72
_STEPS_MS = (
    *(1_000, 5_000, 15_000, 60_000, 5 * 60_000, 15 * 60_000, HOUR_MS, 3 * HOUR_MS, 12 * HOUR_MS),
    *(24 * HOUR_MS * days for days in (1, 7, 30, 365)),
)
_TICKS_MAX = 6
#: The windows that may be chosen, by name.
WINDOWS = {"all": None, "day": 24 * HOUR_MS, "hour": HOUR_MS}


@dataclass(frozen=True)
class Bar:
    """A bar on the base line; `height` is from 0 to 1."""

    x: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Panel:
    """One row of bars."""

    title: str
    total: str  #: The sum over the whole window
    greatest: str  #: The value of a bar of full height
    bars: list[Bar]


@dataclass(frozen=True)
class TimeLine:
    """Panels over one axis of time."""

    begin_ms: int
    end_ms: int
    ticks: list[tuple[float, str]]
    panels: list[Panel]
    versions: str  #: The versions of the window's commits and snapshots


def time_line(objects: StoredObjects, window: str) -> TimeLine | None:
    """Return commits and uploads over time, in a `window` before the newest object; None if there are none."""
    dated = objects.of_kind(COMMIT, SNAPSHOT, PART)
    if not dated.any():
        return None
    times = objects.modified_ms[dated]
    end_ms = int(times.max())
    wide_ms = WINDOWS[window]
    begin_ms = int(times.min()) if wide_ms is None else end_ms - wide_ms
    begin_ms = min(begin_ms, end_ms - 1_000)
    inside = dated & (objects.modified_ms >= begin_ms)
    versions = objects.version[inside & objects.of_kind(COMMIT, SNAPSHOT)]
    return TimeLine(
        begin_ms,
        end_ms,
        ticks(begin_ms, end_ms),
        [
            _panel("Committed", "commit", objects, inside & (objects.kind == COMMIT), begin_ms, end_ms),
            _panel("Uploaded", "object", objects, inside & objects.of_kind(PART, SNAPSHOT), begin_ms, end_ms),
        ],
        f"versions {count(versions.min())} to {count(versions.max())}" if len(versions) else "no version",
    )


def _panel(title: str, unit: str, objects: StoredObjects, rows: NDArray[np.bool_], begin_ms: int, end_ms: int) -> Panel:
    at, sizes, versions = objects.modified_ms[rows], objects.size_bytes[rows], objects.version[rows]
    span_ms = end_ms - begin_ms
    bucket = np.minimum((at - begin_ms) * BUCKETS // span_ms, BUCKETS - 1)
    summed, numbers = np.zeros(BUCKETS, np.int64), np.bincount(bucket, minlength=BUCKETS)
    np.add.at(summed, bucket, sizes)
    lowest, highest = np.full(BUCKETS, np.iinfo(np.int64).max), np.zeros(BUCKETS, np.int64)
    named = versions > 0
    np.minimum.at(lowest, bucket[named], versions[named])
    np.maximum.at(highest, bucket[named], versions[named])
    greatest = int(summed.max(initial=0))
    bars = [
        Bar(
            round(i * WIDTH / BUCKETS, 2),
            round(WIDTH / BUCKETS - 1, 2),
            float(summed[i]) / max(greatest, 1),
            f"{moment(begin_ms + int(i) * span_ms // BUCKETS)}: {size(summed[i])} in {counted(numbers[i], unit)}"
            f"{_versions(int(lowest[i]), int(highest[i]))}",
        )
        for i in np.flatnonzero(numbers)
    ]
    total = int(sizes.sum())
    return Panel(title, f"{size(total)} in {counted(len(sizes), unit)}", size(greatest), bars)


def _versions(lowest: int, highest: int) -> str:
    if not highest:
        return ""
    return f", version {lowest:,}" if lowest == highest else f", versions {lowest:,} to {highest:,}"


def ticks(begin_ms: int, end_ms: int) -> list[tuple[float, str]]:
    """Return the ticks of a time axis: positions in percent, and labels in UTC."""
    span_ms = max(end_ms - begin_ms, 1)
    step_ms = next((step for step in _STEPS_MS if span_ms / step <= _TICKS_MAX), -(-span_ms // _TICKS_MAX))
    first = -(-begin_ms // step_ms) * step_ms
    return [(round((at - begin_ms) / span_ms * 100, 2), _tick(at, step_ms)) for at in range(first, end_ms + 1, step_ms)]


def clock_time(at_ms: int) -> str:
    """Return the time of day, in UTC."""
    return moment(at_ms).partition(" ")[2] or moment(at_ms)


def _tick(at_ms: int, step_ms: int) -> str:
    if step_ms >= 24 * HOUR_MS:
        return moment(at_ms).partition(" ")[0]
    if step_ms >= 12 * HOUR_MS:
        return moment(at_ms)[5:16]
    return clock_time(at_ms) if step_ms < 60_000 else clock_time(at_ms)[:5]


@dataclass(frozen=True)
class Curve:
    """Sizes over time."""

    points: str  #: Points of a polyline: x from 0 to `WIDTH`, y from 0 (the largest size) to `HEIGHT`
    ticks: list[tuple[float, str]]
    greatest: str
    #: The sizes at the start and the end
    first: str
    last: str
    begin_ms: int
    end_ms: int


def curve(at_ms: Column, sizes: NDArray[np.float64]) -> Curve:
    """Return a step curve: each size holds until the next."""
    begin_ms, end_ms = int(at_ms[0]), max(int(at_ms[-1]), int(at_ms[0]) + 1)
    greatest = max(float(sizes.max()), 1.0)
    x = (at_ms - begin_ms) / (end_ms - begin_ms) * WIDTH
    y = HEIGHT - sizes / greatest * (HEIGHT - 2)
    steps = [f"0,{y[0]:.1f}"]
    for i in range(1, len(x)):
        steps += [f"{x[i]:.1f},{y[i - 1]:.1f}", f"{x[i]:.1f},{y[i]:.1f}"]
    steps.append(f"{WIDTH},{y[-1]:.1f}")
    return Curve(
        " ".join(steps),
        ticks(begin_ms, end_ms),
        size(greatest),
        size(sizes[0]),
        size(sizes[-1]),
        begin_ms,
        end_ms,
    )


@dataclass(frozen=True)
class Growth:
    """The size of an operator's state over time, from its stored snapshots."""

    curve: Curve
    #: The number of shards that were read, and of shards with snapshots
    sampled: int
    shards: int
    unreadable: int  #: The number of snapshots that could not be read


def growth(storage: ObjectStorage, executor: Executor, sizes: StateSizes, operator: OperatorSurvey) -> Growth | None:
    """Return an operator's growth; None without snapshots."""

    def read(shard: int) -> list[tuple[int, int | None]]:
        folder = PrefixedStorage(storage, shard_prefix(operator.name, shard))
        snapshots = list_shard(folder).of_kind("snapshot")[-SNAPSHOTS_MAX:]
        return [(stored.modified_ms, sizes.snapshot_bytes(folder.prefix, stored)) for stored in snapshots]

    shards = np.unique(operator.objects.shard[operator.objects.kind == SNAPSHOT])
    chosen = shards[spread(len(shards), SHARDS_MAX)].tolist()
    found = list(executor.map(read, chosen))
    read_sizes = [(at_ms, place, state) for place, of_shard in enumerate(found) for at_ms, state in of_shard]
    known = sorted((at_ms, place, state) for at_ms, place, state in read_sizes if state is not None)
    if not known:
        return None
    total = _total(known)
    scale = len(shards) / len({place for _, place, _ in known})
    drawn = total[spread(len(total), POINTS_MAX)]
    sampled = curve(drawn[:, 0].astype(np.int64), drawn[:, 1] * scale)
    return Growth(sampled, len(chosen), len(shards), len(read_sizes) - len(known))


def _total(known: list[tuple[int, int, int]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return time and total size after each snapshot; a shard's first size also counts before it."""
    current: dict[int, int] = {}
    for _, place, size_bytes in known:
        current.setdefault(place, size_bytes)
    total, points = float(sum(current.values())), []
    for at_ms, place, size_bytes in known:
        total += size_bytes - current[place]
        current[place] = size_bytes
        points.append((float(at_ms), total))
    return np.array(points)
