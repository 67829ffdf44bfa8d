"""The state and timers that a vectorised function reads and writes, for a shard's keys in one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.backends.arrow.rows import IntArray
from holdfast.backends.options import did_you_mean
from holdfast.backends.run import Keys
from holdfast.errors import InvalidArgumentError, SchemaMismatchError
from holdfast.spark_integration.spark_types import owned
from holdfast.spark_integration.timers import NO_TIMER, KeyTimers
from holdfast.spark_integration.ttl.expiry import KeyRows
from holdfast.spark_integration.vectorised.arrays import array_of, rows_where, seen, without_views

_LATEST = np.iinfo(np.int64).max
#: By time unit, the multiplier and divisor for a conversion to milliseconds.
_TO_MS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


class ShardState:
    """The state of the micro-batch's keys, read and written for all keys at once.

    Rows are in the order of `ShardBatch.keys`. Reads see earlier writes. Writes are kept only if the whole
    micro-batch succeeds.
    """

    def __init__(self, rows: KeyRows, schema: pa.Schema) -> None:
        self._rows = rows
        self._schema = schema

    def get(self, default: object = None) -> pa.Table:
        """Return the state, one row per key; a key without state has nulls.

        Parameters
        ----------
        default : value or mapping of str to value, optional
            The value that replaces null, in every column or in the named columns.

        Returns
        -------
        pyarrow.Table
            Shape (keys, state columns).

        Raises
        ------
        InvalidArgumentError
            A column has more than 2 GiB of text, bytes or elements, which exceeds an Arrow array; or a default does not
            fit its column.
        """
        values = seen(self._rows.get().values, self._schema, "state column")
        return values if default is None else _filled(values, default)

    def exists(self) -> pa.Array:
        """Return whether each key has state, even if all columns are null."""
        return pa.array(self._rows.get().exists)

    def put(self, table: pa.Table | None = None, /, *, where: object = None, **columns: object) -> None:
        """Set the state of every key, or of the keys for which `where` is true.

        Parameters
        ----------
        table : pyarrow.Table, optional
            The state columns, one row per key. Alternatively, pass each column by name.
        where : array of bool, shape (keys,), optional
            The keys whose state is set; null counts as false.
        **columns : array, shape (keys,)
            Every state column, by name; pass a column named ``where`` in a table.

        Raises
        ------
        SchemaMismatchError
            A state column is missing or unknown, or a value does not fit its type.
        InvalidArgumentError
            The number of values differs from the number of keys, or the argument is not a table.
        """
        if table is None:
            table = self._table(columns)
        elif columns:
            raise InvalidArgumentError("pass the state as a table or by column, not both")
        elif not isinstance(table, (pa.Table, pa.RecordBatch)):
            raise InvalidArgumentError("state must be a pyarrow.Table, or passed by column", given=type(table).__name__)
        if table.num_rows != len(self._rows):
            raise InvalidArgumentError(
                "state must have one row for each key", rows=table.num_rows, keys=len(self._rows)
            )
        rows = None
        if where is None:
            own = [owned(column) for column in table.columns]
        else:
            rows = rows_where(where, len(self._rows))
            own = [without_views(column).take(pa.array(rows)) for column in table.columns]
        self._rows.put(pa.table(own, names=table.schema.names), rows)

    def delete(self, where: object = None) -> None:
        """Remove the state of every key, or of the keys for which `where` is true."""
        self._rows.delete(None if where is None else rows_where(where, len(self._rows)))

    def _table(self, columns: dict[str, object]) -> pa.Table:
        if sorted(columns) != sorted(self._schema.names):
            raise SchemaMismatchError(
                "state must have exactly the declared columns",
                missing=sorted(set(self._schema.names) - set(columns)),
                unexpected=sorted(set(columns) - set(self._schema.names)),
            )
        return pa.table(
            {name: array_of(columns[name], f"state column {name!r}", len(self._rows)) for name in self._schema.names}
        )


def _filled(values: pa.Table, default: object) -> pa.Table:
    names = values.schema.names
    defaults = default if isinstance(default, Mapping) else dict.fromkeys(names, default)
    for name, value in defaults.items():
        if name not in names:
            raise InvalidArgumentError(f"default names an unknown state column: {name!r}{did_you_mean(name, names)}")
        column = values.column(name)
        try:
            filled = pc.coalesce(column, pa.scalar(value, column.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
            raise InvalidArgumentError(
                f"default {value!r} does not fit state column {name!r}: pass a default per column, as in "
                "get(default={'n': 0})",
                type=str(column.type),
            ) from exc
        values = values.set_column(names.index(name), values.schema.field(name), filled)
    return values


class ShardTimers:
    """The timers of the micro-batch's keys, at most one per key, read and set for all keys at once.

    Rows are in the order of `ShardBatch.keys`. A timer is due once the clock has passed its time: in event time, the
    watermark; in processing time, the planning time of the micro-batch. A due timer adds its key to the micro-batch if
    the key has no rows, and is removed; set it again to be called again.

    Times are in ms since 1970, as in `ShardBatch.watermark_ms`.
    """

    def __init__(self, timers: KeyTimers, keys: Keys, due_ms: IntArray) -> None:
        self._timers = timers
        self._keys = keys
        self._due_ms = due_ms

    @property
    def due_ms(self) -> pa.Array:
        """The time of each key's due timer; null if no timer was due; int64, (keys,)."""
        return _shown(self._due_ms)

    def get(self) -> pa.Array:
        """Return when each key's timer is due; null for a key without a timer; int64, (keys,)."""
        return _shown(self._timers.get(self._keys))

    def set(self, times: object, where: object = None) -> None:
        """Set or replace the timer of every key, or of the keys for which `where` is true.

        Parameters
        ----------
        times : array of timestamp or of integers in ms since 1970, shape (keys,)
            Null removes the timer. A timer in the past is due in the shard's next micro-batch. Timestamps are rounded
            down to the millisecond.
        where : array of bool, shape (keys,), optional
            The keys whose timer is set; null counts as false.

        Raises
        ------
        InvalidArgumentError
            The times are not timestamps or integers, their number differs, or a time is out of range.
        """
        chosen = array_of(times, "timers", len(self._keys))
        rows = np.arange(len(self._keys))
        if where is not None:
            rows = rows_where(where, len(self._keys))
            chosen = chosen.take(pa.array(rows))
        self._change(rows, _milliseconds(chosen))

    def delete(self, where: object = None) -> None:
        """Remove the timer, if any, of every key, or of the keys for which `where` is true."""
        rows = np.arange(len(self._keys)) if where is None else rows_where(where, len(self._keys))
        self._change(rows, np.full(len(rows), NO_TIMER))

    def _change(self, rows: IntArray, new_ms: IntArray) -> None:
        keys = self._keys.take(rows)
        self._timers.change(keys, self._timers.get(keys), new_ms)


def _shown(times_ms: IntArray) -> pa.Array:
    return pa.array(times_ms, mask=times_ms == NO_TIMER)


def _milliseconds(times: pa.Array) -> IntArray:
    factor = divisor = 1
    if pa.types.is_timestamp(times.type):
        factor, divisor = _TO_MS[times.type.unit]
        times = times.view(pa.int64())  # the instant; the time zone affects only the display
    elif not (pa.types.is_integer(times.type) or pa.types.is_null(times.type)):
        raise InvalidArgumentError(
            "timers must be timestamps or integers in milliseconds since 1970", given=str(times.type)
        )
    bounds = pc.min_max(times).as_py()
    if bounds["min"] is not None and bounds["min"] < 0:
        raise InvalidArgumentError("a timer cannot be due before 1970", earliest=bounds["min"])
    if bounds["max"] is not None and bounds["max"] * factor > _LATEST:
        raise InvalidArgumentError("a timer's time in milliseconds must fit into 64 bits", latest=bounds["max"])
    numbers: IntArray = times.cast(pa.int64()).fill_null(NO_TIMER).to_numpy()
    return np.where(numbers == NO_TIMER, NO_TIMER, numbers // divisor * factor)
