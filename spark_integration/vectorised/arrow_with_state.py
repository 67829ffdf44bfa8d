"""``applyInArrowWithState``: calls the user's function once for all keys of a shard, with Arrow columns.

::

    rows ─▶ grouped by key ──┐
                             ├─▶ function(batch) ─▶ output ─▶ evict expired rows
    timers that are due ─────┘      │      ▲
                                    ▼      │
                               states, timers
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from holdfast.backends.arrow.rows import IntArray, one_chunk
from holdfast.backends.column_names import ColumnChanges
from holdfast.backends.options import did_you_mean
from holdfast.backends.run import Keys, TableSchema
from holdfast.errors import InvalidArgumentError
from holdfast.mvcc import Transaction
from holdfast.spark_integration.shard.operator import STATE_TABLE, ShardInput
from holdfast.spark_integration.shard.timeout import TIMEOUT_CONF, TimeMode
from holdfast.spark_integration.spark_types import arrow_schema, conform_output, parse_struct
from holdfast.spark_integration.tables.restarting import StateFunction
from holdfast.spark_integration.timers import NO_TIMER, TIMERS, TIMERS_BY_DUE, DueTimers, KeyTimers, due_before_ms
from holdfast.spark_integration.transport.packed import moments_of
from holdfast.spark_integration.ttl.expiry import (
    EXPIRES,
    LONGEST_TTL_MS,
    KeyTimes,
    expiring_tables,
    expiry_of,
    open_rows,
)
from holdfast.spark_integration.vectorised.arrays import array_of, seen
from holdfast.spark_integration.vectorised.batch import ShardBatch, group_rows, with_due
from holdfast.spark_integration.vectorised.groups import Groups
from holdfast.spark_integration.vectorised.state import ShardState, ShardTimers

_NO_COLUMN = re.compile(r'Field "(.*)" does not exist in schema')

ArrowFunction = Callable[[ShardBatch], "pa.Table | pa.RecordBatch | Mapping[str, Any] | None"]
_CLOCKS: Mapping[str, TimeMode] = {"processing time": "ProcessingTime", "event time": "EventTime"}
_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class StateColumns:
    """The columns and expiry of one state table."""

    types: pa.Schema
    ttl_ms: int | None  #: How long a row lives after a write; None for ever
    clock: TimeMode = "ProcessingTime"  #: The clock that `ttl_ms` refers to


@dataclass(frozen=True)
class ArrowWithState(StateFunction):
    """The `ShardFunction` of ``applyInArrowWithState``."""

    function: ArrowFunction
    #: In the types that the function sees and returns
    key_types: pa.Schema
    output_types: pa.Schema
    states: Mapping[str, StateColumns]  #: By table
    time_mode: TimeMode  #: The kind of timers, if any
    state_changes: Mapping[str, ColumnChanges] = field(default_factory=dict)  #: By table
    event_time: str | None = None  #: The input column with the watermark

    def tables(self) -> Mapping[str, TableSchema]:
        tables: dict[str, TableSchema] = {}
        for name, state in self.states.items():
            if state.ttl_ms is None:
                tables[name] = TableSchema.of(name, self.key_types, state.types)
            else:
                tables |= expiring_tables(name, self.key_types, state.types)
        return {**tables, **KeyTimers.tables(self.key_types, TIMEOUT_CONF[self.time_mode])}

    def changes(self) -> Mapping[str, ColumnChanges]:
        return self.state_changes

    def run(self, batch: ShardInput, transaction: Transaction) -> Generator[pa.RecordBatch, None, int | None]:
        every_key = batch.keys(self.tables()[next(iter(self.states))])
        keys, shown, groups = group_rows(batch.rows, every_key.columns, every_key.hashes, self.key_types)
        call = _ArrowCall(self, batch, transaction)
        due, due_ms = call.fire(), np.full(len(keys), NO_TIMER)
        if due is not None:
            keys, groups, due_ms = with_due(keys, groups, due)
            shown = seen(keys.columns, self.key_types, "key column")
        batch.counts.keys += len(keys)
        batch.counts.timers_due += 0 if due is None else len(due)
        if len(keys):  # none if Spark calls the shard only to evict expired rows
            with _columns_named(self.states, shown, batch.rows):
                returned = self.function(
                    ShardBatch(
                        rows=batch.rows,
                        keys=shown,
                        groups=groups,
                        states=call.states(keys, self._times(batch, groups)),
                        shard=batch.shard,
                        batch_id=batch.batch_id,
                        watermark_ms=batch.times.watermark_ms,
                        processing_ms=batch.times.processing_ms,
                        _timers=call.shard_timers(keys, due_ms),
                    )
                )
            if returned is not None:
                yield conform_output(_with_keys(returned, shown, self.output_types), self.output_types, batch.operator)
        call.evict()
        return call.earliest_ms()

    def _times(self, batch: ShardInput, groups: Groups) -> KeyTimes | None:
        """Return the earliest and latest event time of each key's rows, if a table's TTL uses event time."""
        if self.event_time is None or all(state.clock != "EventTime" for state in self.states.values()):
            return None
        at = one_chunk(moments_of(batch.rows.column(self.event_time))).cast(pa.int64())
        first_us, last_us = (
            found.fill_null((batch.times.watermark_ms or 0) * 1000).to_numpy()
            for found in (groups.min(at), groups.max(at))
        )
        return KeyTimes(first_us // 1000, -(-last_us // 1000))


def _with_keys(returned: object, keys: pa.Table, output: pa.Schema) -> object:
    """Convert a function's output to a table; prepend the key columns that it lacks."""
    if isinstance(returned, Mapping):
        columns = {name: array_of(values, f"column {name!r}", None) for name, values in returned.items()}
        if len({len(column) for column in columns.values()}) > 1:
            raise InvalidArgumentError("columns have different lengths", rows={n: len(c) for n, c in columns.items()})
        returned = pa.table(columns)
    if not isinstance(returned, (pa.Table, pa.RecordBatch)):
        return returned
    missing = [name for name in output.names if name not in returned.schema.names]
    if not missing or not {*missing} <= {*keys.schema.names}:
        return returned
    if returned.num_rows != keys.num_rows:
        raise InvalidArgumentError(
            "missing key columns are added only to output with one row per key, in key order: return the key columns",
            missing=missing,
            rows=returned.num_rows,
            keys=keys.num_rows,
        )
    own = {name: keys.column(name) for name in missing}
    return pa.table(own | dict(zip(returned.schema.names, returned.columns, strict=True)))


class _States(dict[str, ShardState]):
    """State tables by name; the error for an unknown name lists all tables."""

    def __missing__(self, name: str) -> ShardState:
        raise KeyError(f"the operator has no state table {name!r}; it has {', '.join(self)}{did_you_mean(name, self)}")


@contextmanager
def _columns_named(states: Mapping[str, StateColumns], keys: pa.Table, rows: pa.Table) -> Iterator[None]:
    """List the known columns in a note on pyarrow's error about an unknown column."""
    try:
        yield
    except KeyError as exc:
        unknown = _NO_COLUMN.fullmatch(str(exc.args[0]) if exc.args else "")
        if unknown is None:
            raise
        parts = {"the state" if name == STATE_TABLE else f"state {name!r}": of.types for name, of in states.items()}
        columns = {what: list(of.names) for what, of in {**parts, "keys": keys.schema, "rows": rows.schema}.items()}
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in columns.items())
        near = did_you_mean(unknown[1], {name for names in columns.values() for name in names})
        exc.add_note(f"columns of {listed}{near}")
        raise


class _ArrowCall:
    """The timers and state tables of one call for a shard."""

    def __init__(self, step: ArrowWithState, batch: ShardInput, transaction: Transaction) -> None:
        self._step = step
        self._transaction = transaction
        clock = TIMEOUT_CONF[step.time_mode]
        self._due_before_ms = due_before_ms(clock, batch.times)
        by_clock = {"ProcessingTime": batch.times, "EventTime": batch.times.by_event_time()}
        found = {
            name: expiry_of(transaction, name, state.ttl_ms, by_clock[state.clock])
            for name, state in step.states.items()
        }
        self._expiries = {name: expiry for name, expiry in found.items() if expiry is not None}
        self._waking = [expiry for name, expiry in self._expiries.items() if step.states[name].clock == step.time_mode]
        earliest_ms = batch.times.earliest_timer_ms
        self._timers = KeyTimers(transaction, clock, earliest_ms, is_exact=not self._waking)

    def fire(self) -> DueTimers | None:
        """Remove and return the due timers; None if no timer is due."""
        return self._timers.fire(self._due_before_ms)

    def shard_timers(self, keys: Keys, due_ms: IntArray) -> ShardTimers | None:
        """Return the timers of these keys; None if the operator has no timers."""
        return None if self._step.time_mode == "None" else ShardTimers(self._timers, keys, due_ms)

    def states(self, keys: Keys, times: KeyTimes | None) -> dict[str, ShardState]:
        """Return the state tables for these keys; `times` are the event times of their rows."""
        return _States((name, self._state(name, state, keys, times)) for name, state in self._step.states.items())

    def _state(self, name: str, state: StateColumns, keys: Keys, times: KeyTimes | None) -> ShardState:
        times = times if state.clock == "EventTime" else None
        return ShardState(open_rows(self._transaction, name, self._expiries.get(name), keys, times), state.types)

    def evict(self) -> None:
        for expiry in self._expiries.values():
            expiry.evict(self._transaction)

    def earliest_ms(self) -> int | None:
        """Return the time at which Spark must call the shard even without rows; None for never."""
        found = [self._timers.earliest(NO_TIMER)]
        found += [expiry.earliest(self._transaction) for expiry in self._waking]
        return min((at for at in found if at is not None), default=None)


@dataclass(frozen=True)
class StateTable:
    """One state table of an operator, with one row per key.

    Attributes
    ----------
    stateStructType : StructType or str
        The table's columns.
    ttlDurationMs : int, optional
        A row expires this many milliseconds after its last write. An expired row is invisible; the shard's next call
        removes it. None for never.
    ttl : str, optional
        The same as a duration, such as ``"7 days"``.
    by : {"processing time", "event time"}
        The clock: Spark's processing time, or the watermark, for which the time of a write is the latest event time of
        the key's rows in the micro-batch.

    Examples
    --------
    >>> seen = holdfast.StateTable("id string", ttlDurationMs=3_600_000)
    >>> seen = holdfast.StateTable("id string", ttl="7 days", by="event time")
    """

    stateStructType: StructType | str
    ttlDurationMs: int | None = None
    ttl: str | None = None
    by: Literal["processing time", "event time"] = "processing time"


Declared = StructType | str | StateTable


def declared_states(
    states: Declared | Mapping[str, Declared], time_mode: TimeMode, duration_us: Callable[[str], int]
) -> dict[str, StateColumns]:
    """Return an operator's declared state tables by name; an unnamed table is called `STATE_TABLE`."""
    if not isinstance(states, Mapping):
        return {STATE_TABLE: _columns(states, "stateStructType", time_mode, duration_us)}
    if not states:
        raise InvalidArgumentError("stateStructType has no table: declare at least one")
    for name in states:
        require_table_name(name)
    return {
        name: _columns(state, f"stateStructType[{name!r}]", time_mode, duration_us) for name, state in states.items()
    }


def require_table_name(name: object) -> None:
    """Check the name of a state table. Raises `InvalidArgumentError` if it is not allowed."""
    if not _TABLE_NAME.fullmatch(str(name)) or name in (TIMERS, TIMERS_BY_DUE):
        raise InvalidArgumentError(
            f"{name!r} cannot name a state table: use at most 64 letters, digits and '_', no digit first, "
            f"and neither {TIMERS!r} nor {TIMERS_BY_DUE!r}"
        )


def _columns(declared: Declared, what: str, time_mode: TimeMode, duration_us: Callable[[str], int]) -> StateColumns:
    table = declared if isinstance(declared, StateTable) else StateTable(declared)
    types = arrow_schema(parse_struct(table.stateStructType, what), what)
    ttl_ms = table.ttlDurationMs
    if table.ttl is not None:
        if ttl_ms is not None:
            raise InvalidArgumentError(f"{what}: pass ttl or ttlDurationMs, not both")
        ttl_ms = -(-duration_us(table.ttl) // 1000)
    if table.by not in _CLOCKS:
        raise InvalidArgumentError(f"{what}: by must be 'processing time' or 'event time'", given=repr(table.by))
    if ttl_ms is None:
        return StateColumns(types, None)
    if table.by == "event time" and time_mode != "EventTime":
        raise InvalidArgumentError(f"{what}: a ttl by event time needs timeMode='EventTime'", given=time_mode)
    if type(ttl_ms) is not int or not 0 < ttl_ms <= LONGEST_TTL_MS:
        raise InvalidArgumentError(
            f"{what}: ttlDurationMs must be a whole number of milliseconds, at least 1 and at most 10,000 years",
            given=ttl_ms,
        )
    if EXPIRES in types.names:
        raise InvalidArgumentError(f"{what}: a table with a ttl cannot declare {EXPIRES!r}: rename the column")
    return StateColumns(types, ttl_ms, _CLOCKS[table.by])
