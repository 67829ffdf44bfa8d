"""A slab: the keys whose state is fetched and written together, its current key, and Spark's errors for state calls.

Entries of lists and maps are fetched for as many keys at once as memory allows: one scan reads a window of the slab's
keys, starting at the current key. If a window is too large, a smaller window is tried; later windows grow again. If a
single key is too large, it is not fetched, and the caller reads it in pieces, like a key that is called again after its
window was released.
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
# Factor by which a window shrinks if it is too large, and grows otherwise.
_STEP = 4


def state_error(doing: str, condition: str, message: str) -> PySparkRuntimeError:
    """Return the error of a state call; `doing` is, for example, "updating value state". Spark has no class for it."""
    return PySparkRuntimeError(f"Error {doing}: [{condition}] {message}")


def invalid_handle_state(doing: str, operation: str, phase: str) -> PySparkRuntimeError:
    """Return the error of a state call that the processor's phase does not allow."""
    return state_error(
        doing,
        INVALID_HANDLE_STATE,
        f"Failed to perform stateful processor operation={operation} with invalid handle state={phase}.",
    )


class CalledSlab:
    """The keys of a slab; `call` numbers the calls, `phase` is Spark's name of the processor's phase."""

    #: Distinct keys
    keys: Keys  # set by `begin`, before the first call

    def __init__(self) -> None:
        self.call = 0
        self.phase = "CREATED"
        self._at = _NONE
        self._thread = get_ident()

    def begin(self, keys: Keys) -> None:
        """Start a slab with new keys and no current key."""
        self.keys = keys
        self.leave()

    def enter(self, at: int) -> None:
        """Start the call for the key at index `at`."""
        self._at = at
        self.call += 1

    def leave(self) -> None:
        """End the call."""
        self._at = _NONE
        self.call += 1

    def current(self, doing: str) -> int:
        """Return the index of the current key.

        Raises `PySparkRuntimeError` in ``init`` and ``close``, `InvalidArgumentError` in another thread.
        """
        if self._thread != get_ident():
            raise InvalidArgumentError(
                "a thread that the processor started uses the processor's state, and might use another key's: use "
                "state only in the thread that calls the processor"
            )
        if self._at == _NONE:
            raise invalid_handle_state(doing, doing.replace(" ", "_"), self.phase)
        return self._at


class MissingSlab(CalledSlab):
    """Replaces the slab of a variable that ``init`` declared and then deleted."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def current(self, doing: str) -> int:
        """Always raise `PySparkRuntimeError`."""
        raise state_error(
            doing,
            "STATE_STORE_UNSUPPORTED_OPERATION_ON_MISSING_COLUMN_FAMILY",
            f"init declared the variable {self._name} and then deleted it: call deleteIfExists before the declaration "
            "to start with an empty variable, or omit the declaration.",
        )


@dataclass(frozen=True)
class FetchedKeys:
    """The entries of consecutive keys of a slab, sorted by key."""

    #: The range of key indexes
    first: int
    end: int
    entries: Entries  #: ``places`` are relative to `first`
    bounds: list[int]  #: Key i's entries are ``bounds[i - first]`` to ``bounds[i - first + 1]``


class SlabEntries:
    """Fetches a variable's entries in windows of at most `SLAB_BYTES`."""

    def __init__(self, rows: EntryRows, slab: CalledSlab) -> None:
        self._rows = rows
        self._slab = slab
        self._keys = SLAB_KEYS
        self._passed = range(0)

    def begin(self) -> None:
        self._passed = range(0)

    def fetch_once(self, at: int) -> FetchedKeys | None:
        """Like `fetch`, for callers that keep only the last window; return None if an earlier window had key `at`.

        A timer may call a key again, and a window for each such call would fetch many keys and use one.
        """
        passed = self._passed
        if at in passed:
            return None
        found = self.fetch(at)
        end = at + 1 if found is None else found.end
        self._passed = range(min(at, passed.start), max(end, passed.stop)) if passed else range(at, end)
        return found

    def fetch(self, at: int) -> FetchedKeys | None:
        """Return a window that starts at key `at`, or None if this key's entries alone are too large."""
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
