"""A stack of runs: how one version of one table is read, and when runs are merged.

::

    newest   ▒▒            100k rows    a key is looked up from the newest run down;
             ▒▒▒▒▒▒        700k rows    the first run that has it decides, a delete included
    oldest   ▒▒▒▒▒▒▒▒▒▒▒   20M rows

Each run is at least `GROWTH` times as large as everything above it, so a stack is a few runs high and a row
is rewritten a few times in all. A merge by the commit costs at most `GROWTH` times what the commit wrote
itself. Source of the rule: the size-tiered merging of log-structured merge trees (O'Neil et al. 1996).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow_rows import BoolArray, HashArray, IntArray, from_columns, take
from holdfast.backends.base import MAX_HASH, Found
from holdfast.backends.run import Keys, Run, TableSchema, count_live, merge_runs

GROWTH = 4
COMMIT_MERGE_LIMIT_BYTES = 64 << 20
#: How much of a stack is merged at a time: what a merge or a scan needs of memory, whatever the size of the shard.
STRETCH_BYTES = 64 << 20
_SAMPLES_PER_STRETCH = 8


def look_up(runs: Sequence[Run], keys: Keys, schema: TableSchema) -> Found:
    """Return the newest value of each key.

    Parameters
    ----------
    runs : sequence of Run
        Oldest first; the stretches of one run file in any order.
    """
    n = len(keys)
    if not keys.is_sorted:
        order = np.argsort(keys.hashes)
        keys = keys.take(order)
    else:
        order = np.arange(n)
    exists = np.zeros(n, np.bool_)
    places = np.zeros(n, np.int64)
    pieces: list[tuple[Run, np.ndarray]] = []
    held = 0
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
        chosen = order[wanted[live]]
        exists[chosen] = True
        places[chosen] = held + np.arange(len(chosen))
        if len(chosen):
            pieces.append((run, rows[live]))
            held += len(chosen)
    return Found(exists, _gather(pieces, places, exists, schema))


def _within(run: Run, keys: Keys, undecided: BoolArray) -> IntArray:
    """Return which of the undecided keys, which are sorted, have a hash between the first and the last of `run`."""
    if not len(run):
        return np.empty(0, np.int64)
    start, end = _places(keys.hashes, run.hashes[0], run.hashes[-1])
    return start + np.flatnonzero(undecided[start:end])


def merge_in_stretches(
    runs: Sequence[Run], *, drop_deletes: bool, first_hash: int = 0, last_hash: int = MAX_HASH
) -> Iterator[Run]:
    """Merge the rows whose hash lies in [first_hash, last_hash], and yield them by ascending ranges of the hash.

    Parameters
    ----------
    runs : sequence of Run
        Oldest first; the stretches of one run file in any order.
    drop_deletes : bool
        As for `merge_runs`.

    Notes
    -----
    Memory: a few times `STRETCH_BYTES`, and more only where rows of one hash are more than that.
    """
    for part in _stretches(runs, first_hash, last_hash):
        merged = merge_runs(part, drop_deletes=drop_deletes)
        if len(merged):
            yield merged


def merge_prefixes(runs: Sequence[Run], prefixes: Keys) -> Iterator[Run]:
    """Merge the rows that begin with one of `prefixes`, and yield the live ones by ascending ranges of the hash.

    Parameters
    ----------
    runs : sequence of Run
        As for `merge_in_stretches`.
    prefixes : Keys
        As for `holdfast.backends.base.View.scan_prefix`.

    Notes
    -----
    Cost: two binary searches for each hash and run, and reading the rows of these hashes.
    """
    if not len(prefixes):
        return
    prefixes = prefixes.take(np.argsort(prefixes.hashes))
    for part in _stretches(runs, int(prefixes.hashes[0]), int(prefixes.hashes[-1])):
        ends = (min(run.hashes[0] for run in part), max(run.hashes[-1] for run in part))
        near = prefixes.take(np.arange(*_places(prefixes.hashes, *ends)))
        found = [_rows_of(run, np.unique(near.hashes)).with_prefixes(near) for run in part] if len(near) else []
        merged = merge_runs(found, drop_deletes=True) if any(len(run) for run in found) else None
        if merged is not None and len(merged):
            yield merged


def _rows_of(run: Run, hashes: HashArray) -> Run:
    """Return the rows that have one of `hashes`, which ascend and do not repeat."""
    starts = np.searchsorted(run.hashes, hashes, side="left")
    counts = np.searchsorted(run.hashes, hashes, side="right") - starts
    rows = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return Run(run.schema, take(run.batch, rows))


def _places(hashes: HashArray, first: int, last: int) -> tuple[int, int]:
    """Return where in ascending hashes those in [first, last] stand."""
    start = int(np.searchsorted(hashes, np.uint64(first), side="left"))
    return start, int(np.searchsorted(hashes, np.uint64(last), side="right"))


def count_rows(runs: Sequence[Run], first_hash: int, last_hash: int) -> int:
    """Return how many live rows have a hash in [first_hash, last_hash]; values are not read.

    Parameters
    ----------
    runs : sequence of Run
        As for `merge_in_stretches`.
    """
    return sum(count_live(part) for part in _stretches(runs, first_hash, last_hash))


def _stretches(runs: Sequence[Run], first_hash: int, last_hash: int) -> Iterator[list[Run]]:
    """Yield the slices of `runs` by ascending ranges of the hash, each of about `STRETCH_BYTES` in all."""
    runs = [run for run in (r.slice(first_hash, last_hash) for r in runs) if len(run)]
    bounds = [*_cuts(runs), last_hash + 1]
    first = first_hash
    for bound in bounds:
        part = [run for run in (r.slice(first, bound - 1) for r in runs) if len(run)]
        if part:
            yield part
        first = bound


def _cuts(runs: Sequence[Run]) -> list[int]:
    """Return ascending hashes at which new stretches begin: none where all rows make one stretch."""
    if sum(run.size_bytes for run in runs) <= STRETCH_BYTES:
        return []
    samples = []
    for run in runs:
        pieces = max(1, _SAMPLES_PER_STRETCH * run.size_bytes // STRETCH_BYTES)
        # Every sample stands for as many bytes of any run, so every so many of all are one stretch.
        samples.append(run.hashes[:: max(1, len(run) // pieces)])
    hashes = np.sort(np.concatenate(samples))
    return [int(cut) for cut in np.unique(hashes[_SAMPLES_PER_STRETCH::_SAMPLES_PER_STRETCH])]


def _gather(
    pieces: list[tuple[Run, np.ndarray]], places: np.ndarray, exists: np.ndarray, schema: TableSchema
) -> pa.RecordBatch:
    if not pieces:
        empty = [pa.nulls(len(places), f.type) for f in schema.value]
        return from_columns(empty, schema.value, len(places))
    if len(pieces) == 1:
        run, rows = pieces[0]
        places[exists] = rows[places[exists]]
        return take(run.values, pa.array(places, mask=~exists))
    taken = [take(run.values, rows) for run, rows in pieces]
    columns = [pa.concat_arrays([t.column(i) for t in taken]) for i in range(len(schema.value))]
    together = from_columns(columns, schema.value, sum(t.num_rows for t in taken))
    return take(together, pa.array(places, mask=~exists))


def first_to_merge(sizes_bytes: Sequence[int], limit_bytes: int | None = None) -> int:
    """Return where the stretch of runs begins that should be merged with the newest one.

    Parameters
    ----------
    sizes_bytes : sequence of int
        Oldest first, at least one.
    limit_bytes : int, optional
        Merge at most so much; the rest is left to the background.

    Returns
    -------
    int
        Index of the first run to merge; the last index when there is nothing to merge.
    """
    start = len(sizes_bytes) - 1
    total = sizes_bytes[start]
    while start > 0 and sizes_bytes[start - 1] <= GROWTH * total:
        total += sizes_bytes[start - 1]
        if limit_bytes is not None and total > limit_bytes:
            break
        start -= 1
    return start
