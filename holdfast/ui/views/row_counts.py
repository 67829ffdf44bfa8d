"""Counts of rows per shard after the last committed micro-batch.

Nothing stored says it. But a shard's rows ascend by hash, and hashes are even: where the first thousand rows end tells
how many there are. So a shard costs one page of rows, whatever its size. Of many shards some are asked, evenly spaced;
the others count by their size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from holdfast import clock
from holdfast.spark_integration.lookup.query_pointers import StoredOperator
from holdfast.spark_integration.lookup.stored_query import StoredQuery
from holdfast.ui.stored_objects import Column, StoredObjects
from holdfast.ui.views.heat_map import ROWS, Measured
from holdfast.ui.words import count

SHARDS_MAX = 48
_PATIENCE_MS = 4_000
_KNOWN_MAX = 100_000
#: Neighbours in the list are asked for at different times, so that those asked in time are spread.
_STRIDE = 8


class RowCounter:
    """Counts rows, and remembers them: a version never changes.

    `monotonic_ms`: the time.

    Notes
    -----
    Threads: any.
    """

    def __init__(self, monotonic_ms: Callable[[], int] = clock.monotonic_ms) -> None:
        self._monotonic_ms = monotonic_ms
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int, str], int] = {}

    def measured(self, query: StoredQuery, name: str, objects: StoredObjects) -> Measured:
        """Return the rows of each shard with state.

        Raises `StateLostError`, `CorruptionError` or `UnavailableError` if state cannot be read.

        `name`: what the query calls the operator; `objects`: of the operator.
        """
        operator = query.operator(name)
        at = sorted(
            (row.shard, f"{directory} {row.pointer}")
            for directory, rows in operator.pointers.items()
            for row in rows
            if row.pointer is not None
        )
        shards = np.array([shard for shard, _ in at], np.int64)
        places = np.unique(np.linspace(0, len(at) - 1, min(len(at), SHARDS_MAX)).astype(int)).tolist()
        until_ms = self._monotonic_ms() + _PATIENCE_MS
        found: dict[int, int] = {}
        for place in sorted(places, key=lambda one: (places.index(one) % _STRIDE, one)):
            if found and self._monotonic_ms() >= until_ms:
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
    """Return the rows of all shards; uncounted ones are estimated by the rows per byte of the others."""
    place = np.searchsorted(objects.shards, shards)
    place[place >= len(objects.shards)] = 0
    sizes = np.zeros(len(shards), np.int64)
    if len(objects.shards):
        sizes = np.where(objects.shards[place] == shards, objects.stored_bytes[place], 0)
    asked = np.fromiter(found, np.int64, len(found))
    rows = np.fromiter(found.values(), np.int64, len(found))
    values = (sizes * (rows.sum() / max(int(sizes[asked].sum()), 1))).astype(np.int64)
    values[asked] = rows
    return values
