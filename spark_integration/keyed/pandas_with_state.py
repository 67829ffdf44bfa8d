"""``applyInPandasWithState``: calls the user's function once per key with the key's rows as pandas frames.

::

    rows ─▶ sorted by key ─▶ slabs of keys ─▶ for each key: function(key, frames, state) ─▶ output
                               ▲        │
              states, timers ──┘        └──▶ states, timers         one look-up and one write per slab
                                                  │
                               slabs of keys  ◀───┘  due timers, after all keys with rows

The function is called for keys with rows in ascending order, null first and NaN last, and then for keys that have timed
out, earliest first.

The `TimeoutRule` decides which timeout remains after a call. Spark documents that each call clears its key's timeout
unless the function sets a new one. Spark's operator, however, clears it only when it writes the key: after a call that
neither changes the state nor sets a timeout, the old timeout stays, and a fired one fires again in every micro-batch.

The function receives a subclass of Spark's `GroupState`, so ``isinstance`` and Spark's rules and messages apply.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import ArrayType, BinaryType, MapType, Row, StructType

from holdfast.backends.arrow.rows import BoolArray, IntArray
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.run import Keys, TableSchema
from holdfast.errors import HoldfastError
from holdfast.mvcc import Transaction
from holdfast.settings import TimeoutRule
from holdfast.spark_integration.keyed.frame_templates import by_templates
from holdfast.spark_integration.keyed.frames import FrameFormat, KeyFrames, OutputFrames, finished, key_tuples, note_key
from holdfast.spark_integration.keyed.python_values import RowValues, StateValueError
from holdfast.spark_integration.keyed.slabs import SLAB_KEYS, KeyOrder, at_once_of
from holdfast.spark_integration.shard.operator import STATE_TABLE, ShardInput
from holdfast.spark_integration.shard.timeout import TimeoutConf, timeout_of
from holdfast.spark_integration.spark_types import arrow_schema
from holdfast.spark_integration.tables.restarting import StateFunction
from holdfast.spark_integration.timers import NO_TIMER, KeyTimers, due_before_ms
from holdfast.spark_integration.transport.python_stage import rare_full_collections
from holdfast.spark_integration.ttl.expiry import KeyRows, expiry_of, open_rows

#: Private attributes of Spark's `GroupState`; only this module uses them.
PRIVATE = ("_value", "_defined", "_updated", "_removed", "_has_timed_out")
# Column types with mutable values: lists, dicts, bytearrays, numpy arrays or objects.
_CHANGEABLE = (ArrayType, BinaryType, MapType, StructType)
# Types that Spark does not convert. Compared exactly: numpy.float64 subclasses float, pandas.Timestamp datetime.
_PLAIN: frozenset[type] = frozenset(
    {bool, bytes, dt.date, dt.datetime, dt.timedelta, Decimal, float, int, str, type(None)}
)
#: Equivalent to ``Row(*values)``, but three times as fast.
_new_row = partial(tuple.__new__, Row)
PandasFunction = Callable[[Any, Iterable[pd.DataFrame], GroupState], Iterable[pd.DataFrame]]


class KeyStates:
    """Creates the `KeyState` objects of one shard in one micro-batch. Raises `HoldfastError`."""

    def __init__(
        self, state_schema: StructType, timeout_conf: str, processing_time_ms: int, watermark_ms: int | None
    ) -> None:
        without_key = GroupState(
            optionalValue=None,  # type: ignore[arg-type]
            batchProcessingTimeMs=processing_time_ms,
            eventTimeWatermarkMs=GroupState.NO_TIMESTAMP if watermark_ms is None else watermark_ms,
            timeoutConf=timeout_conf,
            hasTimedOut=False,
            watermarkPresent=watermark_ms is not None,
            defined=False,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=state_schema,
        )
        self._attributes = vars(without_key)
        lacking = [name for name in PRIVATE if name not in self._attributes]
        if lacking:
            raise HoldfastError(
                "this PySpark's GroupState lacks attributes that this holdfast release needs: install a holdfast "
                "release that supports this PySpark",
                lacking=" ".join(lacking),
            )
        self._attributes["_kept"] = copier(state_schema)

    def open(self, value: tuple[Any, ...] | None, *, has_timed_out: bool = False) -> KeyState:
        """Return the state of a key; `value` is None if the key has no state."""
        return KeyState(self._attributes, value, has_timed_out)


class KeyState(GroupState):
    """A key's state during one call of the function; `KeyStates.open` creates it."""

    _kept: Callable[[Any], Any] | None

    def __init__(self, attributes: dict[str, Any], value: tuple[Any, ...] | None, has_timed_out: bool) -> None:
        # Skips Spark's __init__: passing thirteen arguments per key is too slow.
        self.__dict__ = attributes.copy()
        self._value = value  # type: ignore[assignment]
        self._defined = value is not None
        self._has_timed_out = has_timed_out

    def update(self, newValue: tuple[Any, ...]) -> None:
        if newValue is None:
            raise PySparkTypeError(errorClass="CANNOT_BE_NONE", messageParameters={"arg_name": "newValue"})
        try:
            values = iter(newValue)
        except TypeError:
            raise TypeError(
                "state.update takes a tuple with one value for each column of stateStructType, "
                f"not {type(newValue).__name__}"
            ) from None
        self._value = _new_row([v if type(v) in _PLAIN else _python_value(v) for v in values])
        self._defined = self._updated = True
        self._removed = False

    @property
    def changed_value(self) -> Literal["put", "delete"] | None:
        """How the call changed the value; None if it did not change."""
        if self._updated:
            return "put"
        return "delete" if self._removed else None

    @property
    def value(self) -> tuple[Any, ...]:
        """A copy of the value to store, unaffected by later changes to a list in it."""
        values = tuple(self._value)
        return values if self._kept is None else tuple(map(self._kept, values))

    @property
    def timer_ms(self) -> int | None:
        """The timeout that the call set, in ms since 1970; None if it set no timeout."""
        return timeout_of(self)


def _python_value(value: Any) -> Any:
    """Convert a numpy or pandas value as Spark's `update` does."""
    if isinstance(value, np.generic):
        return value.tolist()
    if hasattr(value, "to_pytimedelta"):
        return value.to_pytimedelta()
    return value.to_pydatetime() if hasattr(value, "to_pydatetime") else value


def copier(schema: StructType) -> Callable[[Any], Any] | None:
    """Return a function that copies mutable values; None if no column can have any."""
    return _copied if any(isinstance(f.dataType, _CHANGEABLE) for f in schema) else None


def _copied(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return list(value) if _PLAIN.issuperset(map(type, value)) else [_copied(v) for v in value]
    if isinstance(value, dict):
        is_flat = _PLAIN.issuperset(map(type, value.values()))
        return dict(value) if is_flat else {k: _copied(v) for k, v in value.items()}
    if isinstance(value, tuple):
        if not hasattr(value, "__fields__"):
            return tuple(map(_copied, value))
        row = _new_row(map(_copied, value))
        row.__fields__ = value.__fields__
        return row
    if isinstance(value, memoryview) and value.itemsize > 1:  # an array of numbers
        return value.tolist()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return copy.deepcopy(value)


class Timeouts(KeyTimers):
    """A shard's timeouts in one micro-batch."""

    def __init__(
        self,
        transaction: Transaction,
        timeout_conf: TimeoutConf,
        earliest_ms: int | None,
        rule: TimeoutRule,
        *,
        is_exact: bool = True,
    ) -> None:
        super().__init__(transaction, timeout_conf, earliest_ms, is_exact=is_exact)
        self._keeps_untouched = rule == "spark"

    def settle(self, keys: Keys, old_ms: IntArray, set_ms: IntArray, is_written: BoolArray) -> None:
        """Write the timeouts that remain after one call per key.

        `old_ms` is the result of `get`, `set_ms` the timeout that each call set, or `NO_TIMER`; `is_written` marks the
        calls that changed the state.
        """
        stays = (set_ms == NO_TIMER) & ~is_written & self._keeps_untouched
        self.change(keys, old_ms, np.where(stays, old_ms, set_ms))

    def earliest(self, none_before_ms: int) -> int | None:
        # No timer is due before `none_before_ms`, as fired timers are removed, unless the rule keeps them.
        return super().earliest(NO_TIMER if self._keeps_untouched else none_before_ms)


@dataclass(frozen=True)
class PandasWithState(StateFunction):
    """The `ShardFunction` of ``applyInPandasWithState``."""

    function: PandasFunction
    key_types: pa.Schema  #: With the types that Spark exchanges with Python
    state: StructType
    output: StructType
    timeout_conf: TimeoutConf
    timeout_rule: TimeoutRule
    frame_format: FrameFormat
    rows_each: int  #: Maximum rows per frame
    shown_keys: list[int]  #: Index of the key column for each value of a key tuple; may repeat
    shown_columns: list[str]  #: Columns of the frames; may repeat
    state_changes: Mapping[str, ColumnChanges] = field(default_factory=dict)  #: By table
    frame_templates: bool = True  #: Whether templates speed up the frames that the function makes

    def tables(self) -> Mapping[str, TableSchema]:
        values = arrow_schema(self.state, "stateStructType", keep_not_null=True)
        state = TableSchema.of(STATE_TABLE, self.key_types, values)
        return {STATE_TABLE: state, **KeyTimers.tables(self.key_types, self.timeout_conf)}

    def changes(self) -> Mapping[str, ColumnChanges]:
        return self.state_changes

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        steps = self._run(batch, transaction)
        return by_templates(steps) if self.frame_templates else steps

    def _run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        keys = batch.keys(self.tables()[STATE_TABLE])
        order = KeyOrder.of(keys)
        frames = KeyFrames(
            batch.rows.select(self.shown_columns), order.rows, order.starts, self.frame_format, self.rows_each
        )
        calls = _KeyCalls(self, batch, transaction)
        with rare_full_collections():
            for slab in frames.slabs(calls.at_once):
                first_rows = order.first_rows(slab.first_key, slab.keys)
                shown = batch.keys_shown_at(first_rows)
                yield from calls.with_rows(keys.take(first_rows), shown, slab)
            yield from calls.timed_out(frames.empty)
            yield from calls.finish()
        return calls.close()


class _KeyCalls:
    """Calls the function for each key and writes the changes once per slab."""

    def __init__(self, step: PandasWithState, batch: ShardInput, transaction: Transaction) -> None:
        self._step = step
        self._operator = batch.operator
        self._counts = batch.counts
        times = batch.times
        self._states = KeyStates(step.state, step.timeout_conf, times.processing_ms, times.watermark_ms)
        self._transaction = transaction
        self.at_once = at_once_of(batch.operator, step.state)
        # Expires rows of an earlier operator with a time to live; this operator's own rows never expire.
        self._expiry = expiry_of(transaction, STATE_TABLE, None, times)
        self._values = RowValues(step.state)
        self._output = OutputFrames(step.output, step.frame_format, step.rows_each)
        self._fired_before_ms = due_before_ms(step.timeout_conf, times)
        self._timeouts = Timeouts(
            transaction,
            step.timeout_conf,
            times.earliest_timer_ms,
            step.timeout_rule,
            is_exact=self._expiry is None,
        )

    def with_rows(
        self, keys: Keys, shown: pa.Table, chunks: Iterable[Iterator[pd.DataFrame]]
    ) -> Iterator[pa.RecordBatch]:
        return self._call_each(keys, shown, chunks, self._timeouts.get(keys), has_timed_out=False)

    def timed_out(self, empty_frames: Callable[[int], Iterator[pd.DataFrame]]) -> Iterator[pa.RecordBatch]:
        """Call the function with one empty frame for each key whose timer is due."""
        timers = self._timeouts.due(self._fired_before_ms, SLAB_KEYS)
        for due in chain.from_iterable(some.pieces(self.at_once) for some in timers):
            shown = pa.Table.from_batches([due.keys.columns]).cast(self._step.key_types)
            chunks = ([frame] for frame in empty_frames(len(due)))
            self._counts.timers_due += len(due)
            yield from self._call_each(due.keys, shown, chunks, due.due_ms, has_timed_out=True)

    def finish(self) -> Iterator[pa.RecordBatch]:
        return finished(self._output, self._operator)

    def close(self) -> int | None:
        """Remove expired state; return when the shard must be called next, None if only rows require a call."""
        found = [self._timeouts.earliest(self._fired_before_ms)]
        if self._expiry is not None:
            self._expiry.evict(self._transaction)
            if self._step.timeout_conf == "ProcessingTimeTimeout":
                found.append(self._expiry.earliest(self._transaction))
        return min((at for at in found if at is not None), default=None)

    def _call_each(
        self,
        keys: Keys,
        shown: pa.Table,
        chunks: Iterable[Iterable[pd.DataFrame]],
        old_timers_ms: IntArray,
        *,
        has_timed_out: bool,
    ) -> Iterator[pa.RecordBatch]:
        function, output, open_state = self._step.function, self._output, self._states.open
        tuples = key_tuples(shown.select(self._step.shown_keys), self._step.frame_format)
        changes, moved_bytes = _Changes(tuples), self._transaction.measures.moved_bytes
        rows = open_rows(self._transaction, STATE_TABLE, self._expiry, keys)
        values = self._values.of_found(rows.get())
        self._counts.keys += len(tuples)
        for at, (key, frames, value) in enumerate(zip(tuples, chunks, values, strict=True)):
            state = open_state(value, has_timed_out=has_timed_out)
            try:
                yield from output.add_all(function(key, frames, state), key)
                changes.take(at, state, existed=value is not None)
            except Exception as exc:
                note_key(exc, self._operator, output.failed_key or key)
                raise
        self._write(rows, changes)
        self._timeouts.settle(keys, old_timers_ms, changes.timers_ms, changes.is_written)
        self.at_once.learn(len(keys), self._transaction.measures.moved_bytes - moved_bytes)

    def _write(self, rows: KeyRows, changes: _Changes) -> None:
        try:
            values = self._values.to_arrow(changes.values)
        except StateValueError as exc:
            note_key(exc, self._operator, changes.keys[changes.put[exc.row]])
            raise
        if changes.put:
            rows.put(values, np.array(changes.put))
        if changes.deleted:
            rows.delete(np.array(changes.deleted))


class _Changes:
    """The changes made by the calls for one slab, by index in `keys`.

    `values` has the order of `put`; `timers_ms` holds the timeout that each call set, or `NO_TIMER`; `is_written` marks
    changed values.
    """

    def __init__(self, keys: list[tuple[Any, ...]]) -> None:
        self.keys = keys
        self.put: list[int] = []
        self.values: list[tuple[Any, ...]] = []
        self.deleted: list[int] = []
        self.timers_ms: IntArray = np.full(len(keys), NO_TIMER)
        self.is_written: BoolArray = np.zeros(len(keys), np.bool_)

    def take(self, at: int, state: KeyState, *, existed: bool) -> None:
        change, timer_ms = state.changed_value, state.timer_ms
        if change is not None:
            self.is_written[at] = True
            if change == "put":
                self.put.append(at)
                self.values.append(state.value)
            elif existed:
                self.deleted.append(at)
        if timer_ms is not None:
            self.timers_ms[at] = timer_ms
