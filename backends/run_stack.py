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

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow_rows import from_columns, take
from holdfast.backends.base import Found
from holdfast.backends.run import Keys, Run, TableSchema

GROWTH = 4
COMMIT_MERGE_LIMIT_BYTES = 64 << 20


def look_up(runs: Sequence[Run], keys: Keys, schema: TableSchema) -> Found:
    """Return the newest value of each key.

    Parameters
    ----------
    runs : sequence of Run
        Oldest first.
    """
    n = len(keys)
    exists = np.zeros(n, np.bool_)
    places = np.zeros(n, np.int64)
    pieces: list[tuple[Run, np.ndarray]] = []
    held = 0
    pending = np.arange(n)
    for run in reversed(runs):
        if not len(pending):
            break
        rows = run.find(keys if len(pending) == n else keys.take(pending))
        hit = rows >= 0
        live = hit.copy()
        live[hit] = ~run.deleted[rows[hit]]
        chosen = pending[live]
        exists[chosen] = True
        places[chosen] = held + np.arange(len(chosen))
        if len(chosen):
            pieces.append((run, rows[live]))
            held += len(chosen)
        pending = pending[~hit]
    return Found(exists, _gather(pieces, places, exists, schema))


def _gather(
    pieces: list[tuple[Run, np.ndarray]], places: np.ndarray, exists: np.ndarray, schema: TableSchema
) -> pa.RecordBatch:
    if not pieces:
        empty = [pa.nulls(len(places), f.type) for f in schema.value]
        return from_columns(empty, schema.value, len(places))
    if len(pieces) == 1:
        run, rows = pieces[0]
        places[exists] = rows
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
