"""An operator's shards as a heat map, their skew, and one shard's versions and snapshots.

A map has at most `CELLS_MAX` cells. With more shards, a cell covers several consecutive shards, takes the colour of the
largest, and links to their map.

Row counts are estimates: rows are ordered by hash, and hashes are uniform, so the hash of the thousandth row gives the
total. The page samples evenly spaced shards, and estimates the others from their size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast import clock
from holdfast.commands.log import describe, note, size_of
from holdfast.commands.target import size
from holdfast.errors import NotFoundError
from holdfast.health import Failure, count, counted, duration, percent, read_failures, reports, times
from holdfast.snapshotter.ownership.operator_record import shard_prefix
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.snapshotter.upkeep.catalogue import Headers, list_shard
from holdfast.spark_integration.lookup.query_pointers import StoredOperator
from holdfast.spark_integration.lookup.stored_query import StoredQuery
from holdfast.ui.survey import KINDS, Column, OperatorSurvey, StoredObjects, spread

CELLS_MAX = 240
BARS_MAX = 60
LEVELS = 9
SHARDS_MAX = 48
_TOP = 8
_PATIENCE_MS = 4_000
_KNOWN_MAX = 100_000
#: Neighbouring shards are sampled at different times, so that a timeout leaves an even sample.
_STRIDE = 8
VERSIONS_MAX = 20


@dataclass(frozen=True)
class Measure:
    name: str  #: In the URL
    title: str
    values: Callable[[OperatorSurvey], Column]
    text: Callable[[float], str]  #: A value as text
    is_sum: bool  #: Whether the values of several shards add up
    explained: str


MEASURES = {
    measure.name: measure
    for measure in (
        Measure(
            "size",
            "Size",
            lambda o: o.state,
            size,
            True,
            "The newest snapshot and the commits since, without objects that only older versions need.",
        ),
        Measure(
            "written",
            "Written recently",
            lambda o: o.objects.recent_bytes,
            size,
            True,
            "Bytes committed in the hour before the operator's newest object.",
        ),
        Measure(
            "lag",
            "Snapshot lag",
            lambda o: o.objects.lag,
            lambda n: counted(n, "commit"),
            False,
            "Commits since the newest snapshot, or all if there is none yet: a restore replays these. "
            "Small commits kept in Spark's checkpoint do not count.",
        ),
        Measure(
            "age",
            "Time lag",
            lambda o: o.objects.lag_ms,
            duration,
            False,
            "Time from the newest snapshot, or else the oldest commit, to the newest commit.",
        ),
    )
}


#: Needs the query: see `RowCounter`.
ROWS = Measure(
    "rows",
    "Rows",
    lambda o: np.zeros(len(o.objects.shards), np.int64),
    lambda n: f"{count(n)} rows",
    True,
    "Rows of all tables.",
)
CHOICES = {**MEASURES, ROWS.name: ROWS}


@dataclass(frozen=True)
class Cell:
    """One shard, or several consecutive ones."""

    #: Numbers of shards
    first: int
    last: int
    text: str  #: The value, or for several shards the largest and the sum; empty if nothing is stored
    level: int  #: From 0 to `LEVELS`, relative to the largest of all cells


@dataclass(frozen=True)
class HeatMap:
    """A map of the shards from `first` to `last`, and the largest of them."""

    measure: Measure
    note: str  #: How the values were determined
    first: int
    last: int
    is_whole: bool  #: Whether these are all shards
    cells: list[Cell]
    legend: list[str]  #: The upper limit of each level
    #: The shards with the largest values: number, value, value as text, and multiple of the median
    top: list[tuple[int, int, str, str]]


@dataclass(frozen=True)
class Measured:
    measure: Measure
    #: Numbers of shards, ascending, and their values; other shards have none
    shards: Column
    values: Column
    note: str = ""  #: How the values were determined, if that is not obvious


def measured(operator: OperatorSurvey, measure: Measure) -> Measured:
    """Return the values of an operator's shards, from its listing."""
    note = ""
    if measure is MEASURES["size"] and operator.estimated:
        note = f"{count(operator.estimated)} shards are estimated from the others."
    return Measured(measure, operator.objects.shards, measure.values(operator), note)


def heat_map(operator: OperatorSurvey, found: Measured, first: int = 0, last: int | None = None) -> HeatMap:
    """Return the heat map of an operator's shards from `first` to `last`, limited to existing shards."""
    end = max(operator.shard_count - 1, 0)
    low = min(max(first, 0), end)
    high = end if last is None else min(max(last, low), end)
    inside = (found.shards >= low) & (found.shards <= high)
    shards, values = found.shards[inside], found.values[inside]
    measure = found.measure
    return HeatMap(
        measure,
        found.note,
        low,
        high,
        (low, high) == (0, end),
        _cells(measure, shards, values, low, high) if operator.shard_count else [],
        [measure.text(int(values.max(initial=0)) * level / LEVELS) for level in range(LEVELS + 1)],
        _top(measure, shards, values),
    )


def _cells(measure: Measure, shards: Column, values: Column, low: int, high: int) -> list[Cell]:
    wide = high - low + 1
    each = -(-wide // CELLS_MAX)
    number = -(-wide // each)
    cell_of = (shards - low) // each
    filled, most, sums = np.zeros(number, np.int64), np.zeros(number, np.int64), np.zeros(number, np.int64)
    np.add.at(filled, cell_of, 1)
    np.add.at(sums, cell_of, values)
    np.maximum.at(most, cell_of, values)
    levels = np.ceil(most / max(int(most.max(initial=0)), 1) * LEVELS).astype(int)

    def text(cell: int) -> str:
        if each == 1 or not filled[cell]:
            return measure.text(most[cell]) if filled[cell] else ""
        whole = f", {measure.text(sums[cell])} in all" if measure.is_sum else ""
        return f"{measure.text(most[cell])} at most{whole}"

    return [Cell(low + i * each, min(low + (i + 1) * each - 1, high), text(i), int(levels[i])) for i in range(number)]


def _top(measure: Measure, shards: Column, values: Column) -> list[tuple[int, int, str, str]]:
    median = float(np.median(values)) if len(values) else 0.0
    order = np.argsort(-values, kind="stable")[:_TOP]
    return [
        (int(shards[i]), int(values[i]), measure.text(values[i]), times(values[i] / median) if median else "")
        for i in order
        if values[i] > 0
    ]


@dataclass(frozen=True)
class Skew:
    """How unevenly a measure is spread over the shards, largest first."""

    sentence: str
    bars: list[tuple[float, str]]  #: Height from 0 to 1, and label; a bar may cover several ranks
    median: float  #: The median's height


def skew(operator: OperatorSurvey, found: Measured) -> Skew | None:
    """Return how uneven the shards are; None if there is nothing to compare."""
    measure = found.measure
    values = np.zeros(min(operator.shard_count, 10_000_000), np.int64)
    values[: min(len(found.values), len(values))] = np.sort(found.values)[::-1][: len(values)]
    greatest = int(values.max(initial=0))
    if len(values) < 2 or not greatest:
        return None
    median = float(np.median(values))
    edges = np.unique(np.linspace(0, len(values), min(len(values), BARS_MAX) + 1).astype(int))
    means = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    bars = []
    for mean, start, end in zip(means, edges[:-1], edges[1:], strict=True):
        ranks = f"rank {end:,}" if end == start + 1 else f"ranks {start + 1:,} to {end:,}"
        bars.append((float(mean) / greatest, f"{ranks}: {measure.text(mean)}"))
    by = f", {times(greatest / median)} the median of {measure.text(median)}" if median else ", and most have none"
    tenth = -(-len(values) // 10)
    share = percent(int(values[:tenth].sum()) / int(values.sum()))
    held = f" The largest {count(tenth)} of {count(len(values))} hold {share} of the total." if measure.is_sum else ""
    return Skew(f"The largest has {measure.text(greatest)}{by}.{held}", bars, median / greatest)


class RowCounter:
    """Counts rows per shard after the last committed micro-batch, and caches the counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int, str], int] = {}

    def measured(self, query: StoredQuery, name: str, objects: StoredObjects) -> Measured:
        """Return the rows of each shard with state. Raises `StateLostError`, `CorruptionError`, `UnavailableError`."""
        operator = query.operator(name)
        at = sorted(
            (row.shard, f"{directory} {row.pointer}")
            for directory, rows in operator.pointers.items()
            for row in rows
            if row.pointer is not None
        )
        shards = np.array([shard for shard, _ in at], np.int64)
        places = spread(len(at), SHARDS_MAX)
        until_ms = clock.monotonic_ms() + _PATIENCE_MS
        found: dict[int, int] = {}
        for place in sorted(places, key=lambda one: (places.index(one) % _STRIDE, one)):
            if found and clock.monotonic_ms() >= until_ms:
                break
            found[place] = self._rows(query, operator, *at[place])
        if len(found) == len(at):
            note = "After the last committed micro-batch; counts above 1,000 are estimates."
        else:
            note = f"{count(len(found))} of {count(len(at))} shards estimated by their hashes, the others by size."
        return Measured(ROWS, shards, _filled(shards, found, objects), note)

    def _rows(self, query: StoredQuery, operator: StoredOperator, shard: int, version: str) -> int:
        key = (operator.name, shard, version)
        with self._lock:
            if key in self._known:
                return self._known[key]
        rows = sum(
            query.row_count(operator.name, table, shard, batch_id=operator.batch_id) for table in operator.tables
        )
        with self._lock:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[key] = rows
        return rows


def _filled(shards: Column, found: dict[int, int], objects: StoredObjects) -> Column:
    """Return the rows of all shards; uncounted shards are estimated from the others' rows per byte."""
    place = np.searchsorted(objects.shards, shards)
    place[place >= len(objects.shards)] = 0
    sizes = np.zeros(len(shards), np.int64)
    if len(objects.shards):
        sizes = np.where(objects.shards[place] == shards, objects.stored_bytes[place], 0)
    counted_at = np.fromiter(found, np.int64, len(found))
    rows = np.fromiter(found.values(), np.int64, len(found))
    values = (sizes * (rows.sum() / max(int(sizes[counted_at].sum()), 1))).astype(np.int64)
    values[counted_at] = rows
    return values


@dataclass(frozen=True)
class ShardView:
    shard: int
    kinds: list[tuple[str, int, int]]  #: Kind of object, number of objects, and their bytes
    rows: list[dict[str, Any]]  #: The newest `VERSIONS_MAX` versions as `describe` returns them, with a note
    versions: int  #: The number of commits and snapshots
    commits_since_snapshot: int  #: All commits, if there is no snapshot
    has_snapshot: bool
    state_bytes: int
    failures: list[Failure]  #: Failures of this shard
    #: The neighbouring shards
    before: int | None
    after: int | None


def shard_view(
    storage: ObjectStorage, executor: Executor, operator: OperatorSurvey, shard: int, committed: int | None = None
) -> ShardView:
    """Return a shard's content after the last `committed` micro-batch."""
    if shard >= operator.shard_count:
        raise NotFoundError("the operator has no such shard", shard=shard, shards=operator.shard_count)
    folder = PrefixedStorage(storage, shard_prefix(operator.name, shard))
    listing, headers = list_shard(folder), Headers(folder)
    newest = [*reversed(listing.versions)][:VERSIONS_MAX]
    described = executor.map(partial(describe, headers), newest)
    totals = [(kind, listing.of_kind(kind)) for kind in KINDS]
    return ShardView(
        shard,
        [(kind, len(found), sum(o.size_bytes for o in found)) for kind, found in totals if found],
        [row | {"note": note(row), "size_bytes": size_of(row)} for row in described],
        len(listing.versions),
        listing.commits_since_snapshot,
        listing.newest_snapshot is not None,
        int(operator.state[operator.objects.shards == shard].sum()),
        read_failures(storage, reports([listing], committed)),
        shard - 1 if shard else None,
        shard + 1 if shard + 1 < operator.shard_count else None,
    )
