"""A stack of runs: how one version of one table is read, and when its runs are merged.

::

    newest   ▒▒            100k rows    a key is looked up from the newest run down;
             ▒▒▒▒▒▒        700k rows    the first run that has it decides, a delete included
    oldest   ▒▒▒▒▒▒▒▒▒▒▒   20M rows

After a merge, the new run is smaller than `1 / GROWTH` of the run below it. A stack thus has few runs, and a row is
rewritten few times: size-tiered merging (O'Neil et al. 1996; docs/decisions/0005-run-files.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.crowds import column_in_order
from holdfast.backends.arrow.rows import (
    BoolArray,
    HashArray,
    IntArray,
    filter_rows,
    from_columns,
    inverse,
    null_rows,
    order_rows,
    take,
)
from holdfast.backends.base import MAX_HASH, Found
from holdfast.backends.evolution import project
from holdfast.backends.run import Keys, Run, TableSchema, merge_runs

GROWTH = 1.75
COMMIT_MERGE_LIMIT_BYTES = 64 << 20
# A commit merges at most 1/8 of the bytes of a background merge, since the background writes them again.
_SHARE_OF_COMMIT = 8
#: The bytes of a stack merged at a time: bounds the memory of merges and scans, whatever the shard's size.
STRETCH_BYTES = 64 << 20
#: The bytes a scan merges for its first rows; each later stretch is `_STRETCH_GROWTH` times larger.
FIRST_STRETCH_BYTES = 256 << 10
_STRETCH_GROWTH = 4
# A block is 1/16 of a stretch. A stretch ends after 12 whole blocks, plus the partial blocks of the other runs.
_BLOCKS, _BLOCKS_PER_STRETCH = 12, 16
# At least this many rows of one hash, such as timers due at the same time, are read in parts.
_CROWD_ROWS = 4096


class Stacked(Protocol):
    """What look-ups need of a run; `Run` and `holdfast.backends.stretched_run.StretchedRun` implement it."""

    def __len__(self) -> int: ...

    @property
    def schema(self) -> TableSchema:
        """The schema that the run was written with."""

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last hash; the run must not be empty."""

    @property
    def parts(self) -> list[Run]:
        """The run's stretches, by ascending hash."""

    def find(self, keys: Keys) -> IntArray:
        """Return the row of each key, or -1; keys are sorted."""

    def deleted_at(self, rows: IntArray) -> BoolArray:
        """Return which of `rows` are deletes, shape (n,)."""

    def values_at(self, rows: IntArray) -> pa.RecordBatch:
        """Return the values of `rows`, which may be in any order."""


def parts_of(runs: Iterable[Stacked]) -> list[Run]:
    """Return the stretches of all runs, for merges and scans."""
    return [part for run in runs for part in run.parts]


def look_up(
    runs: Sequence[Stacked], keys: Keys, schema: TableSchema, floor: Callable[[Keys], Found] | None = None
) -> Found:
    """Return each key's newest value in `runs`, which are oldest first; `floor` looks up the keys that no run has."""
    n = len(keys)
    order = None if keys.is_sorted else np.argsort(keys.hashes)
    keys = keys if order is None else keys.take(order)
    hits: list[tuple[IntArray, pa.RecordBatch]] = []
    undecided = np.ones(n, np.bool_)
    for run in reversed(runs):
        wanted = _within(run, keys, undecided)
        if not len(wanted):
            continue
        rows = run.find(keys if len(wanted) == n else keys.take(wanted))
        hit = rows >= 0
        wanted, rows = wanted[hit], rows[hit]
        undecided[wanted] = False
        live = ~run.deleted_at(rows)
        if live.any():
            hits.append((wanted[live], project(run.values_at(rows[live]), schema.value)))
    if floor is not None and undecided.all():
        return _in_order(floor(keys), order)
    if floor is not None and undecided.any():
        wanted = np.flatnonzero(undecided)
        found = floor(keys.take(wanted))
        hits.append((wanted[found.exists], filter_rows(found.values, found.exists)))
    return _placed(hits, n, order, schema)


def _within(run: Stacked, keys: Keys, undecided: BoolArray) -> IntArray:
    """Return the positions of the undecided keys within the hash range of `run`; keys are sorted."""
    if not len(run):
        return np.empty(0, np.int64)
    start, end = _places(keys.hashes, *run.ends)
    return start + np.flatnonzero(undecided[start:end])


def merge_in_stretches(runs: Sequence[Run], *, drop_deletes: bool, first_bytes: int | None = None) -> Iterator[Run]:
    """Merge runs, and yield the rows in order, in stretches, the first of about `first_bytes`.

    A hash with more rows than a stretch may span several.
    """
    for stretch in _stretches(runs, 0, MAX_HASH, first_bytes):
        rest, crowd = _apart(stretch)
        for part in filter(None, (rest, *_ranges(crowd))):
            merged = merge_runs(part, drop_deletes=drop_deletes)
            if len(merged):
                yield merged


def merge_over(below: Iterable[Run], writes: Sequence[Run]) -> Iterator[Run]:
    """Merge `writes`, oldest first, over the live rows that `below` yields in hash order; reads `below` lazily."""
    if not writes:
        yield from (run for run in below if len(run))
        return
    own = merge_runs(writes, drop_deletes=False)
    live = merge_runs([own], drop_deletes=True)
    done = 0
    for run in below:
        if len(run):
            ready = max(done, _rows_up_to(live, run))
            parts = [
                part for part in (_hide(run, own), Run(live.schema, live.batch.slice(done, ready - done))) if len(part)
            ]
            if parts:
                yield merge_runs(parts, drop_deletes=False)
            done = ready
    yield from scan_runs([Run(live.schema, live.batch.slice(done))], 0, MAX_HASH)


def scan_above(
    floor: Callable[[int, int], Iterator[Run]], runs: Sequence[Run], first_hash: int, last_hash: int
) -> Iterator[Run]:
    """Merge runs over the live rows that `floor` scans, and yield live rows as `scan_runs` does."""
    start = first_hash
    for part in _stretches(runs, first_hash, last_hash, FIRST_STRETCH_BYTES):
        end = max(int(run.hashes[-1]) for run in part)
        yield from merge_over(floor(start, end), part)
        start = end + 1
    if start <= last_hash:
        yield from floor(start, last_hash)


def prefixes_above(below: Iterable[Run], runs: Sequence[Run], prefixes: Keys) -> Iterator[Run]:
    """Merge the rows of `runs` that begin with one of `prefixes` over the rows of `below`."""
    prefixes = prefixes if prefixes.is_sorted else prefixes.take(np.argsort(prefixes.hashes))
    found = [run.near(prefixes).with_prefixes(prefixes) for run in runs if len(run)]
    return merge_over(below, [run for run in found if len(run)])


def _rows_up_to(run: Run, below: Run) -> int:
    """Return how many rows of `run` come at or before the last row of `below`."""
    start, end = _places(run.hashes, below.hashes[-1], below.hashes[-1])
    if start == end:
        return start
    crowd, last = _taken(run, np.arange(start, end)), _taken(below, np.array([len(below) - 1]))
    columns = [pa.concat_arrays(pair) for pair in zip(crowd.keys.columns, last.keys.columns, strict=True)]
    both = from_columns(columns, run.schema.key, len(crowd) + 1)
    order = order_rows(np.concatenate([crowd.hashes, last.hashes]), both).rows
    return start + int(np.flatnonzero(order == len(crowd))[0])


def _hide(run: Run, newer: Run) -> Run:
    """Return the rows of `run` whose keys are not in `newer`."""
    near = newer.slice(run.hashes[0], run.hashes[-1])
    if len(near) < len(run):
        is_left = np.ones(len(run), np.bool_)
        rows = run.find(Keys(near.hashes, near.keys))
        is_left[rows[rows >= 0]] = False
    else:
        is_left = near.find(Keys(run.hashes, run.keys)) < 0
    return Run(run.schema, filter_rows(run.batch, is_left))


def scan_runs(runs: Sequence[Run], first_hash: int, last_hash: int) -> Iterator[Run]:
    """Merge like `merge_in_stretches`, but yield only live rows, the first of them cheaply; a hash may span runs."""
    for part in _stretches(runs, first_hash, last_hash, FIRST_STRETCH_BYTES):
        last = int(max(run.hashes[-1] for run in part))
        crowd = _slices(part, last, last)
        if sum(map(len, crowd)) < _CROWD_ROWS:
            yield from _live(part)
        else:
            yield from _live(_slices(part, 0, last - 1) if last else [])
            yield from _scan_crowd(crowd)


def _live(runs: Sequence[Run]) -> Iterator[Run]:
    if runs:
        merged = merge_runs(runs, drop_deletes=True)
        if len(merged):
            yield merged


def _scan_crowd(runs: Sequence[Run]) -> Iterator[Run]:
    """Lazily yield the live rows of runs that hold a single hash, oldest run first."""
    for i, run in enumerate(runs):
        start, rows, most = 0, _CROWD_ROWS // 4, max(_CROWD_ROWS, len(run) * STRETCH_BYTES // run.size_bytes)
        while start < len(run):
            found = Run(run.schema, run.batch.slice(start, rows))
            start, rows = start + rows, min(rows * _STRETCH_GROWTH, most)
            keys, is_left = Keys(found.hashes, found.keys), ~found.deleted
            for newer in runs[i + 1 :]:
                is_left &= newer.find(keys) < 0
            if is_left.any():
                yield Run(run.schema, filter_rows(found.batch, is_left))


def merge_prefixes(runs: Sequence[Run], prefixes: Keys) -> Iterator[Run]:
    """Merge the rows that begin with one of `prefixes`; yield the live rows in ascending hash ranges."""
    if not len(prefixes):
        return
    prefixes = prefixes.take(np.argsort(prefixes.hashes))
    for part in _stretches(runs, int(prefixes.hashes[0]), int(prefixes.hashes[-1])):
        rest, crowd = _apart(part)
        yield from _begun_with(rest, prefixes)
        if crowd:
            near = prefixes.slice(*_places(prefixes.hashes, *crowd[0].ends))
            crowd = [run for run in (one.near(near) for one in crowd) if len(run)]
            found = (run.with_prefixes(near) for run in _scan_crowd(crowd))
            yield from (run for run in found if len(run))


def _apart(runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """Split off the rows of the last hash if they are too many to hold at once; else return all rows, and none."""
    last = max(run.ends[1] for run in runs)
    crowd = _slices(runs, last, last) if _size_bytes(runs) > STRETCH_BYTES else []
    if _size_bytes(crowd) <= STRETCH_BYTES:
        return runs, []
    return _slices(runs, 0, last - 1) if last else [], crowd


def _ranges(crowd: list[Run]) -> Iterator[list[Run]]:
    """Yield runs of a single hash in stretches: ranges of a column in which all runs ascend, or all rows if none."""
    place = column_in_order([run.keys for run in crowd]) if crowd else None
    if place is None:
        yield crowd
        return
    columns = [run.keys.column(place) for run in crowd]
    blocks = [column[:: _rows_of_block(run, STRETCH_BYTES)] for run, column in zip(crowd, columns, strict=True)]
    bounds = pa.concat_arrays(blocks).sort()[_BLOCKS::_BLOCKS]
    cuts = [[0, *(pc.sum(pc.less(column, bound)).as_py() for bound in bounds), len(column)] for column in columns]
    for ends in pairwise(zip(*cuts, strict=True)):
        places = zip(crowd, *ends, strict=True)
        yield [Run(run.schema, run.batch.slice(start, end - start)) for run, start, end in places if start < end]


def _begun_with(runs: Sequence[Run], prefixes: Keys) -> Iterator[Run]:
    """Yield the live rows that begin with one of `prefixes`; prefixes are sorted."""
    if not runs:
        return
    ends = (min(run.ends[0] for run in runs), max(run.ends[1] for run in runs))
    near = prefixes.slice(*_places(prefixes.hashes, *ends))
    found = [run.near(near).with_prefixes(near) for run in runs] if len(near) else []
    yield from _live([run for run in found if len(run)])


def _size_bytes(runs: Iterable[Run]) -> int:
    return sum(run.size_bytes for run in runs)


def _places(hashes: HashArray, first: int, last: int) -> tuple[int, int]:
    """Return the start and end of the hashes in [first, last]; hashes are sorted."""
    start = int(np.searchsorted(hashes, np.uint64(first), side="left"))
    return start, int(np.searchsorted(hashes, np.uint64(last), side="right"))


def _stretches(
    runs: Sequence[Run], first_hash: int, last_hash: int, first_bytes: int | None = None
) -> Iterator[list[Run]]:
    """Yield slices of `runs` in ascending hash ranges, growing from `first_bytes` to `STRETCH_BYTES`."""
    size_bytes = min(first_bytes or STRETCH_BYTES, STRETCH_BYTES)
    rest = _slices(runs, first_hash, last_hash)
    while rest:
        last = _last_hash(rest, size_bytes)
        if last is None or last == last_hash:
            yield rest
            return
        yield _slices(rest, first_hash, last)
        rest = _slices(rest, last + 1, last_hash)
        size_bytes = min(size_bytes * _STRETCH_GROWTH, STRETCH_BYTES)


def _taken(run: Run, rows: IntArray) -> Run:
    return Run(run.schema, take(run.batch, rows))


def _slices(runs: Iterable[Run], first_hash: int, last_hash: int) -> list[Run]:
    return [run for run in (r.slice(first_hash, last_hash) for r in runs) if len(run)]


def _last_hash(runs: Sequence[Run], size_bytes: int) -> int | None:
    """Return the last hash of a stretch of the first rows; None if all rows fit in one stretch."""
    if _size_bytes(runs) <= size_bytes:
        return None
    ends = []
    for run in runs:
        # All blocks have the same size, so a stretch ends after a fixed number of blocks.
        rows = _rows_of_block(run, size_bytes)
        ends.append(run.hashes[rows - 1 : rows * _BLOCKS : rows])
    hashes = np.sort(np.concatenate(ends))
    return int(hashes[_BLOCKS - 1]) if len(hashes) >= _BLOCKS else None


def _rows_of_block(run: Run, stretch_bytes: int) -> int:
    return max(1, len(run) * stretch_bytes // (_BLOCKS_PER_STRETCH * run.size_bytes))


def _in_order(found: Found, order: IntArray | None) -> Found:
    """Return the result in the order that the keys had before sorting by `order`."""
    if order is None:
        return found
    places = inverse(order)
    return Found(found.exists[places], take(found.values, places))


def _placed(hits: list[tuple[IntArray, pa.RecordBatch]], n: int, order: IntArray | None, schema: TableSchema) -> Found:
    """Assemble a look-up's result from `hits`, whose positions `order` maps to the keys' original order."""
    if len(hits) == 1 and order is None and len(hits[0][0]) == n:
        return Found(np.ones(n, np.bool_), hits[0][1])
    exists = np.zeros(n, np.bool_)
    if not hits:
        return Found(exists, null_rows(schema.value, n))
    chosen = np.concatenate([wanted for wanted, _ in hits])
    chosen = chosen if order is None else order[chosen]
    exists[chosen] = True
    places = np.zeros(n, np.int64)
    places[chosen] = np.arange(len(chosen))
    columns = [pa.concat_arrays([values.column(i) for _, values in hits]) for i in range(len(schema.value))]
    together = from_columns(columns, schema.value, len(chosen))
    return Found(exists, take(together, pa.array(places, mask=None if exists.all() else ~exists)))


def first_to_merge(sizes_bytes: Sequence[int], limit_bytes: int | None = None) -> int:
    """Return the oldest run to merge with all newer runs, given sizes oldest first; the last index means no merge."""
    start = _first_of_stretch(sizes_bytes)
    total_bytes = sum(sizes_bytes[start:])
    if limit_bytes is None or total_bytes <= limit_bytes:
        return start
    return _first_of_stretch(sizes_bytes, min(limit_bytes, total_bytes // _SHARE_OF_COMMIT))


def _first_of_stretch(sizes_bytes: Sequence[int], limit_bytes: float = np.inf) -> int:
    start = len(sizes_bytes) - 1
    total_bytes = sizes_bytes[start]
    while start > 0 and sizes_bytes[start - 1] <= GROWTH * total_bytes:
        total_bytes += sizes_bytes[start - 1]
        if total_bytes > limit_bytes:
            break
        start -= 1
    return start
