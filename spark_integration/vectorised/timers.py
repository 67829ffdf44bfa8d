"""Timers of one shard's keys in one micro-batch, for a vectorised function."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import IntArray
from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.tables.key_timers import NEVER, KeyTimers
from holdfast.spark_integration.vectorised.arrays import array_of, rows_where

_LATEST = np.iinfo(np.int64).max
#: By what a number in each unit of time is multiplied and divided.
_TO_MS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


class ShardTimers:
    """Timers of the micro-batch's keys, at most one per key, read and set for all of them at once.

    Rows are in the order of `ShardBatch.keys`. A timer is due once its time has passed: in event time, the watermark is
    later; in processing time, the micro-batch was planned later. A due timer brings its key into the micro-batch, with
    or without rows, and is gone: set it again to bring the key back.

    Times are in ms since 1970, as in `ShardBatch.watermark_ms`.
    """

    def __init__(self, timers: KeyTimers, keys: Keys, due_ms: IntArray) -> None:
        self._timers = timers
        self._keys = keys
        self._due_ms = due_ms

    @property
    def due_ms(self) -> pa.Array:
        """When the timer that brought each key into this micro-batch was due, or null; int64, (keys,)."""
        return _shown(self._due_ms)

    def get(self) -> pa.Array:
        """Return when each key's timer is due; null if it has none left; int64, (keys,)."""
        return _shown(self._timers.get(self._keys))

    def set(self, times: object, where: object = None) -> None:
        """Set the timer of every key, or of those where `where` is true, in place of the one it has.

        Parameters
        ----------
        times : array of timestamp or of integers in ms since 1970, shape (keys,)
            Null for no timer. A time that has passed is due in the shard's next micro-batch. Timestamps are rounded
            down to the millisecond.
        where : array of bool, shape (keys,), optional
            Null counts as false.

        Raises
        ------
        InvalidArgumentError
            Neither timestamps nor integers, not one for each key, or a time to set that is before 1970 or too late.
        """
        chosen = array_of(times, "timers", len(self._keys))
        rows = np.arange(len(self._keys))
        if where is not None:
            rows = rows_where(where, len(self._keys))
            chosen = chosen.take(pa.array(rows))
        self._change(rows, _milliseconds(chosen))

    def delete(self, where: object = None) -> None:
        """Remove the timer of every key, or of those where `where` is true; none is fine."""
        rows = np.arange(len(self._keys)) if where is None else rows_where(where, len(self._keys))
        self._change(rows, np.full(len(rows), NEVER))

    def _change(self, rows: IntArray, new_ms: IntArray) -> None:
        keys = self._keys.take(rows)
        self._timers.change(keys, self._timers.get(keys), new_ms)


def _shown(times_ms: IntArray) -> pa.Array:
    return pa.array(times_ms, mask=times_ms == NEVER)


def _milliseconds(times: pa.Array) -> IntArray:
    factor = divisor = 1
    if pa.types.is_timestamp(times.type):
        factor, divisor = _TO_MS[times.type.unit]
        times = times.view(pa.int64())  # the instant; a zone says only how it is shown
    elif not (pa.types.is_integer(times.type) or pa.types.is_null(times.type)):
        raise InvalidArgumentError(
            "timers must be timestamps, or integers in milliseconds since 1970", given=str(times.type)
        )
    bounds = pc.min_max(times).as_py()
    if bounds["min"] is not None and bounds["min"] < 0:
        raise InvalidArgumentError("a timer cannot be due before 1970", earliest=bounds["min"])
    if bounds["max"] is not None and bounds["max"] * factor > _LATEST:
        raise InvalidArgumentError("a timer's time in milliseconds must fit into 64 bits", latest=bounds["max"])
    numbers: IntArray = times.cast(pa.int64()).fill_null(NEVER).to_numpy()
    return np.where(numbers == NEVER, NEVER, numbers // divisor * factor)
