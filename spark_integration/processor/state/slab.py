"""The keys whose state is fetched and written together, which of them is being called, and Spark's errors about them.

Entries of lists and maps are fetched for many keys at once, as many as memory allows: one scan reads a window of the
slab's keys, from the one being called. If it holds too much, a smaller window is tried; the next ones grow again. If
even one key holds too much, it is not fetched, and the caller reads it piece by piece; likewise for a key that is
called again after its window was released.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import get_ident

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError

from holdfast.backends.arrow.rows import IntArray
from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.keyed.slabs import SLAB_BYTES, SLAB_KEYS
from holdfast.spark_integration.tables.entry_rows import Entries, EntryRows

INVALID_HANDLE_STATE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE"
_NONE = -1
# After a window that holds too much, the next has a fraction of its keys; otherwise more.
_STEP = 4


def state_error(doing: str, condition: str, message: str) -> PySparkRuntimeError:
    """Return the error of a state call, which has no class in Spark; `doing`: "updating value state"."""
    return PySparkRuntimeError(f"Error {doing}: [{condition}] {message}")


def invalid_handle_state(doing: str, operation: str, phase: str) -> PySparkRuntimeError:
    """Return the error of a call at a time when the processor may not make it."""
    return state_error(
        doing,
        INVALID_HANDLE_STATE,
        f"Failed to perform stateful processor operation={operation} with invalid handle state={phase}.",
    )


class CalledSlab:
    """The keys of a slab; `call` numbers the running call, `phase` is Spark's name for it."""

    #: Each once
    keys: Keys  # from the first `begin` on; no call runs before

    def __init__(self) -> None:
        self.call = 0
        self.phase = "CREATED"
        self._at = _NONE
        self._thread = get_ident()

    def begin(self, keys: Keys) -> None:
        """Start with new keys; none is being called."""
        self.keys = keys
        self.leave()

    def enter(self, at: int) -> None:
        """Begin the call of key `at`."""
        self._at = at
        self.call += 1

    def leave(self) -> None:
        """End the call."""
        self._at = _NONE
        self.call += 1

    def current(self, doing: str) -> int:
        """Return which key is being called.

        Raises `PySparkRuntimeError` in ``init`` and ``close``, `InvalidArgumentError` in another thread.
        """
        if self._thread != get_ident():
            raise InvalidArgumentError(
                "a thread that the processor started uses its state: use it only in the thread that calls the "
                "processor, or another key's state could be read and written"
            )
        if self._at == _NONE:
            raise invalid_handle_state(doing, doing.replace(" ", "_"), self.phase)
        return self._at


class MissingSlab(CalledSlab):
    """Stands in for a slab after ``init`` has deleted the variable it declared. `name`: the variable."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def current(self, doing: str) -> int:
        """Always raise `PySparkRuntimeError`."""
        raise state_error(
            doing,
            "STATE_STORE_UNSUPPORTED_OPERATION_ON_MISSING_COLUMN_FAMILY",
            f"init has declared the variable {self._name} and then deleted it: call deleteIfExists before the "
            "declaration, which then finds it empty, or leave the declaration out.",
        )


@dataclass(frozen=True)
class FetchedKeys:
    """The entries of consecutive keys of a slab, sorted by key."""

    #: Which keys
    first: int
    end: int
    entries: Entries  #: ``places`` counts from `first`
    bounds: list[int]  #: Entries of key i: from ``bounds[i - first]`` up to ``bounds[i - first + 1]``


class SlabEntries:
    """Windows of one variable's entries, of `SLAB_BYTES` at most."""

    def __init__(self, rows: EntryRows, slab: CalledSlab) -> None:
        self._rows = rows
        self._slab = slab
        self._keys = SLAB_KEYS
        self._passed = range(0)

    def begin(self) -> None:
        self._passed = range(0)

    def fetch_once(self, at: int) -> FetchedKeys | None:
        """Like `fetch`, for callers that keep only the last window; None if a window has passed key `at`.

        A timer may call a key again: a window for each such call would fetch many keys to use one.
        """
        passed = self._passed
        if at in passed:
            return None
        found = self.fetch(at)
        end = at + 1 if found is None else found.end
        self._passed = range(min(at, passed.start), max(end, passed.stop)) if passed else range(at, end)
        return found

    def fetch(self, at: int) -> FetchedKeys | None:
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

    def _read(self, first: int, end: int) -> FetchedKeys | None:
        keys = self._slab.keys.slice(first, end)
        parts: list[Entries] = []
        size_bytes = 0
        for part in self._rows.scan(keys):
            parts.append(part)
            size_bytes += part.size_bytes
            if size_bytes > SLAB_BYTES:
                return None
        if not parts:
            places: IntArray = np.empty(0, np.int64)
            own_keys, values = (
                pa.RecordBatch.from_pylist([], schema=of) for of in (self._rows.own_key_types, self._rows.value_types)
            )
            return FetchedKeys(first, end, Entries(places, own_keys, values), [0] * (end - first + 1))
        found = _joined(parts)
        found = found.take(np.argsort(found.places, kind="stable"))
        bounds = np.searchsorted(found.places, np.arange(end - first + 1))
        return FetchedKeys(first, end, found, bounds.tolist())


def _joined(parts: list[Entries]) -> Entries:
    if len(parts) == 1:
        return parts[0]
    return Entries(
        np.concatenate([part.places for part in parts]),
        pa.concat_batches([part.own_keys for part in parts]),
        pa.concat_batches([part.values for part in parts]),
    )
