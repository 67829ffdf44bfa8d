"""Fetches the entries of lists and maps for many keys at once, as many as memory allows.

A window of the slab's keys, from the one being called on, is read by one scan. If it holds too much, a smaller window
is tried; the next ones grow again. What a single key holds may be too much too: then it is not fetched at all, and the
caller reads it piece by piece. So it does with a key that is called again when its window was let go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from holdfast.backends.arrow.rows import IntArray
from holdfast.spark_integration.keyed.slabs import SLAB_BYTES, SLAB_KEYS
from holdfast.spark_integration.processor.state.slab import Slab
from holdfast.spark_integration.tables.entry_rows import Entries, EntryRows

# A window that holds too much is followed by one of a fraction of its keys; one that does not, by one of more.
_STEP = 4


@dataclass(frozen=True)
class Window:
    """The entries of consecutive keys of a slab, sorted by key."""

    #: Which keys
    first: int
    end: int
    entries: Entries  #: ``places`` counts from `first`
    bounds: list[int]  #: The entries of key i stand from ``bounds[i - first]`` up to ``bounds[i - first + 1]``


class SlabEntries:
    """Windows of one variable's entries. `limit_bytes`: what a window may hold."""

    def __init__(self, rows: EntryRows, slab: Slab, limit_bytes: int = SLAB_BYTES) -> None:
        self._rows = rows
        self._slab = slab
        self._limit_bytes = limit_bytes
        self._keys = SLAB_KEYS
        self._passed = range(0)

    def begin(self) -> None:
        """Begin another slab."""
        self._passed = range(0)

    def fetch_once(self, at: int) -> Window | None:
        """Return a window as `fetch` does, for who keeps only the last one; None also if one has passed key `at`.

        Timers call a key again after others, if several are due. A window for each such call would bring what many keys
        hold, for one of them.
        """
        passed = self._passed
        if at in passed:
            return None
        found = self.fetch(at)
        end = at + 1 if found is None else found.end
        self._passed = range(min(at, passed.start), max(end, passed.stop)) if passed else range(at, end)
        return found

    def fetch(self, at: int) -> Window | None:
        """Return a window that begins with key `at`; None if that key's entries alone are too large."""
        end = min(len(self._slab.keys), at + self._keys)
        while True:
            found = self._read(at, end)
            if found is not None:
                self._keys = min(SLAB_KEYS, _STEP * max(end - at, self._keys))
                return found
            if end == at + 1:
                self._keys = 1
                return None
            end = at + max(1, (end - at) // _STEP)
            self._keys = end - at

    def _read(self, first: int, end: int) -> Window | None:
        keys = self._slab.keys.take(np.arange(first, end))
        parts: list[Entries] = []
        size_bytes = 0
        for part in self._rows.scan(keys):
            parts.append(part)
            size_bytes += part.size_bytes
            if size_bytes > self._limit_bytes:
                return None
        if not parts:
            return Window(first, end, _nothing(self._rows), [0] * (end - first + 1))
        found = _joined(parts)
        found = found.take(np.argsort(found.places, kind="stable"))
        bounds = np.searchsorted(found.places, np.arange(end - first + 1))
        return Window(first, end, found, bounds.tolist())


def _joined(parts: list[Entries]) -> Entries:
    if len(parts) == 1:
        return parts[0]
    return Entries(
        np.concatenate([part.places for part in parts]),
        pa.concat_batches([part.own_keys for part in parts]),
        pa.concat_batches([part.values for part in parts]),
    )


def _nothing(rows: EntryRows) -> Entries:
    places: IntArray = np.empty(0, np.int64)
    return Entries(places, _no_rows(rows.own_key_types), _no_rows(rows.value_types))


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
